"""Compares the service with a Python server that calls torch (baseline_server.py), on one device."""

import contextlib
import functools

from bench_records import record, record_of_rounds
from e2e import grpc_load
from e2e.fixture import Fixture, checked, in_turn, same_rounds, say
from e2e.logprobctl import RETRIES, LoadPlan
from e2e.processes import gpu_memory_mib
from server_process import ServerProcess

SMALL_ROWS = 16
SMALL_CLIENTS = 64
SMALL_PROCESSES = 4  # in one process, only one gRPC thread at a time handles events
BULK_IN_FLIGHT = 4
COMPILES_WITHIN_S = 150  # time limit of the first request of a shape with torch.compile
BULK_TARGET = 3
SMALL_TARGET = 20
BUDGET_S = 35  # time for each size of request
SERVICE = "Service"
SHARED = "Service, shared memory"  # the default of clients on the same host
NAMES = {"eager": "Python gRPC and torch", "compiled": "Python gRPC and torch.compile"}


def measure(fixture: Fixture) -> None:
    """Measures the service and the baselines. A server that fails is left out; the others are still measured."""
    hidden = fixture.hidden_sizes[0]
    failures: list[str] = []
    with contextlib.ExitStack() as servers:
        free = gpu_memory_mib()
        service = servers.enter_context(
            fixture.server(hidden, "--local", str(fixture.work / "socket-baselines"))
        )
        bulk_rate(fixture, service.grpc, hidden)
        add_memory(fixture, hidden, SERVICE, free)
        addresses: dict[str, str] = {}
        loader = ""
        for name in fixture.baselines:
            before = gpu_memory_mib()
            try:
                baseline = servers.enter_context(
                    start(fixture, hidden, is_compiled=name != "eager")
                )
                addresses[name] = baseline.grpc
                loader = loader or faster_loader(fixture, baseline.grpc, hidden)
                bulk_rate(fixture, baseline.grpc, hidden, loader, timeout_s=COMPILES_WITHIN_S)
            except (RuntimeError, AssertionError) as error:
                say(f"  {NAMES[name]} FAILED: {error}")
                failures.append(f"{NAMES[name]}: {str(error)[-1000:]}")
                addresses.pop(name, None)
                continue
            add_memory(fixture, hidden, NAMES[name], before)
        if addresses:
            compare_bulk(fixture, hidden, service.grpc, addresses, loader, failures)
            compare_small(fixture, hidden, service.grpc, addresses, failures)
        if failures:  # raised inside the context, so that the logs of the servers are shown
            raise RuntimeError("; ".join(failures))


def start(
    fixture: Fixture, hidden: int, *, is_compiled: bool
) -> contextlib.AbstractContextManager[ServerProcess]:
    sizes = (
        SMALL_ROWS,
        min(1024, fixture.batch_rows),
        min(2048, fixture.batch_rows),
    )  # 2048 rows are one chunk of the baseline
    options = ["--warm-rows", *(f"{rows}" for rows in sizes)]
    return fixture.baseline(hidden, *options, *(["--compile"] if is_compiled else []))


def add_memory(fixture: Fixture, hidden: int, name: str, before: float | None) -> None:
    """Records by how much GPU memory grew from `before`. This is the peak of a server, since none frees memory."""
    after = gpu_memory_mib()
    if before is not None and after is not None:
        what = f"{name}, {fixture.shape(hidden)}: GPU memory under bulk load"
        fixture.records.append(record(what, after - before, "MiB"))


def bulk_rate(
    fixture: Fixture, address: str, hidden: int, loader: str = "logprobctl", timeout_s: float = 30
) -> float:
    """Returns rows per second of requests of a whole batch, split by logprobctl or sent in one message each."""
    if loader == "logprobctl":
        plan = LoadPlan(
            rows=fixture.batch_rows,
            seconds=fixture.seconds,
            concurrency=BULK_IN_FLIGHT,
            channels=8,
            retries=RETRIES,
            timeout_s=timeout_s,
        )
        return checked(fixture.load.run(address, plan), "bulk").rows_per_second
    requests = grpc_load.Requests(fixture.batch_rows, hidden, fixture.vocab)
    return grpc_load.rows_per_second(
        address, requests, seconds=fixture.seconds, processes=BULK_IN_FLIGHT, inflight=1
    )


def faster_loader(fixture: Fixture, address: str, hidden: int) -> str:
    """Returns the faster loader of the baseline: logprobctl with messages of 8 MiB, or whole requests."""
    rates = {name: bulk_rate(fixture, address, hidden, name) for name in ("logprobctl", "whole")}
    say("  baseline by loader: " + ", ".join(f"{name} {r:,.0f}" for name, r in rates.items()))
    return max(rates, key=lambda name: rates[name])


def compare_bulk(
    fixture: Fixture, hidden: int, service: str, baselines: dict, loader: str, failures: list[str]
) -> None:
    contenders = {SERVICE: functools.partial(bulk_rate, fixture, service, hidden)}
    for name, address in baselines.items():
        contenders[name] = functools.partial(bulk_rate, fixture, address, hidden, loader)
    figures = in_turn(contenders, fixture.rounds_within(BUDGET_S), failures)
    how = {"logprobctl": "split into messages of 8 MiB", "whole": "each in one message"}[loader]
    what = f"requests of {fixture.batch_rows} rows"
    add(fixture, hidden, what, figures, BULK_TARGET, f"requests of the baseline {how}")


def compare_small(
    fixture: Fixture, hidden: int, service: str, baselines: dict, failures: list[str]
) -> None:
    def rate(address: str, transport: str = "tcp") -> float:
        plan = LoadPlan(
            rows=SMALL_ROWS,
            seconds=fixture.seconds,
            concurrency=SMALL_CLIENTS,
            channels=SMALL_CLIENTS,
            transport=transport,
            warmup=SMALL_CLIENTS,
            retries=RETRIES,
        )
        loads = fixture.load.run_parts(address, plan, SMALL_PROCESSES)
        return sum(checked(load, "small requests").rows_per_second for load in loads)

    addresses = {SERVICE: service, **baselines}
    contenders = {name: functools.partial(rate, address) for name, address in addresses.items()}
    contenders[SHARED] = functools.partial(rate, service, "shm")
    figures = in_turn(contenders, fixture.rounds_within(BUDGET_S), failures)
    what = f"requests of {SMALL_ROWS} rows from {SMALL_CLIENTS} clients"
    remark = f"one connection per client, in {SMALL_PROCESSES} processes"
    for contender in (SERVICE, SHARED):
        add(fixture, hidden, what, figures, SMALL_TARGET, remark, contender)


def add(
    fixture: Fixture,
    hidden: int,
    what: str,
    figures: dict,
    target: float,
    remark: str,
    contender: str = SERVICE,
) -> None:
    for name, title in NAMES.items():
        if not figures[contender] or not figures.get(name):
            continue
        service = same_rounds(figures[contender], figures[name])
        fixture.records.append(
            record_of_rounds(
                f"{contender}, {what}, {fixture.shape(hidden)}",
                "rows/s",
                service,
                baseline=(title, same_rounds(figures[name], service)),
                note=f"{remark}; target at least {target}",
            )
        )
