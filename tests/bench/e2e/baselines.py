"""The service against what one would write in Python instead (baseline_server.py), on one device."""

import functools

from bench_records import record, record_of_rounds
from e2e import grpc_load
from e2e.load import LoadPlan
from e2e.processes import BaselineProcess, gpu_memory_mib
from e2e.scene import Scene, checked, in_turn, say

SMALL_ROWS = 16
SMALL_CLIENTS = 64
BULK_IN_FLIGHT = 4
RETRIES = 8  # a Python server may be slow to take 64 connections
BULK_WANTED = 3
SMALL_WANTED = 20
BUDGET_S = 35  # for each size of request
NAMES = {"eager": "Python gRPC and torch", "compiled": "Python gRPC and torch.compile"}


def measure(scene: Scene) -> None:
    hidden = scene.hidden_sizes[0]
    model = scene.model(hidden)
    warm = ["--warm-rows", *(f"{rows}" for rows in (SMALL_ROWS, min(1024, scene.batch_rows)))]
    warm += [f"{min(2048, scene.batch_rows)}"]  # baseline_server.py's chunks
    free = gpu_memory_mib()
    with scene.server(hidden) as server:
        memory = {"service": peak_memory(free, lambda: bulk_rate(scene, server.grpc, hidden))}
        before = gpu_memory_mib()
        with BaselineProcess(model, scene.device, *warm) as eager:
            way = better_way(scene, eager.grpc, hidden)
            memory["eager"] = peak_memory(before, lambda: None)
            before = gpu_memory_mib()
            with BaselineProcess(model, scene.device, "--compile", *warm) as compiled:
                bulk_rate(scene, compiled.grpc, hidden, way)
                memory["compiled"] = peak_memory(before, lambda: None)
                addresses = {"eager": eager.grpc, "compiled": compiled.grpc}
                compare_bulk(scene, hidden, server.grpc, addresses, way)
                compare_small(scene, hidden, server.grpc, addresses)
    names = {"service": "Service", **NAMES}
    for name, mib in memory.items():
        if mib is not None:
            what = f"{names[name]}, {scene.shape(hidden)}: GPU memory under bulk load"
            scene.records.append(record(what, mib, "MiB"))


def peak_memory(before: float | None, work) -> float | None:
    """GPU memory that a process has taken since `before`, after `work`: none gives any back."""
    work()
    after = gpu_memory_mib()
    return None if before is None or after is None else after - before


def bulk_rate(scene: Scene, address: str, hidden: int, way: str = "logprobctl") -> float:
    """Rows a second in requests of a whole batch, sent by logprobctl or each in one message."""
    if way == "logprobctl":
        plan = LoadPlan(
            rows=scene.batch_rows,
            seconds=scene.seconds,
            concurrency=BULK_IN_FLIGHT,
            channels=8,
            retries=RETRIES,
        )
        return checked(scene.load.run(address, plan), "bulk").rows_per_second
    requests = grpc_load.Requests(scene.batch_rows, hidden, scene.vocab)
    return grpc_load.rows_per_second(
        address, requests, seconds=scene.seconds, processes=BULK_IN_FLIGHT, inflight=1
    )


def better_way(scene: Scene, address: str, hidden: int) -> str:
    """How the baseline is faster: cut into messages of 8 MiB by logprobctl, or whole requests."""
    rates = {way: bulk_rate(scene, address, hidden, way) for way in ("logprobctl", "whole")}
    say("  baseline by way of loading: " + ", ".join(f"{w} {r:,.0f}" for w, r in rates.items()))
    return max(rates, key=lambda way: rates[way])


def compare_bulk(scene: Scene, hidden: int, service: str, baselines: dict, way: str) -> None:
    contenders = {"service": functools.partial(bulk_rate, scene, service, hidden)}
    for name, address in baselines.items():
        contenders[name] = functools.partial(bulk_rate, scene, address, hidden, way)
    figures = in_turn(contenders, scene.rounds_within(BUDGET_S))
    how = {"logprobctl": "cut into messages of 8 MiB", "whole": "each in one message"}[way]
    add(
        scene,
        hidden,
        f"requests of {scene.batch_rows} rows",
        figures,
        BULK_WANTED,
        f"baseline's requests {how}",
    )


def compare_small(scene: Scene, hidden: int, service: str, baselines: dict) -> None:
    def rate(address: str) -> float:
        plan = LoadPlan(
            rows=SMALL_ROWS,
            seconds=scene.seconds,
            concurrency=SMALL_CLIENTS,
            channels=SMALL_CLIENTS,
            warmup=SMALL_CLIENTS,
            retries=RETRIES,
        )
        return checked(scene.load.run(address, plan), "small requests").rows_per_second

    addresses = {"service": service, **baselines}
    contenders = {name: functools.partial(rate, address) for name, address in addresses.items()}
    figures = in_turn(contenders, scene.rounds_within(BUDGET_S))
    what = f"requests of {SMALL_ROWS} rows from {SMALL_CLIENTS} clients"
    add(scene, hidden, what, figures, SMALL_WANTED, "a connection each")


def add(scene: Scene, hidden: int, what: str, figures: dict, wanted: float, remark: str) -> None:
    for name, title in NAMES.items():
        if name not in figures:
            continue
        scene.records.append(
            record_of_rounds(
                f"Service, {what}, {scene.shape(hidden)}",
                "rows/s",
                figures["service"],
                baseline=(title, figures[name]),
                note=f"{remark}; wanted at least {wanted}",
            )
        )
