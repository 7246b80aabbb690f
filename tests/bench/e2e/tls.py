"""What TLS costs: the latency of one row, and the throughput and core-seconds of a bulk load over TCP."""

import functools
import pathlib
import resource

from bench_records import record_of_rounds
from e2e.fixture import Fixture, checked, in_turn, median, same_rounds, say
from e2e.logprobctl import RETRIES, Load, LoadPlan
from server_process import ServerProcess
from tls_certificates import Authority

BULK_OF_ENGINE = 0.95  # target
CHANNELS = 16
BUDGET_S = 100
PLAIN, TLS = "plaintext", "TLS 1.3"


def measure(fixture: Fixture) -> None:
    hidden = fixture.hidden_sizes[0]
    authority = Authority(fixture.work)
    cert, key = authority.issue("server")
    with (
        fixture.engine(hidden) as engine,
        fixture.server(hidden, "--local", "none") as plain,
        fixture.server(
            hidden, "--local", "none", "--tls-cert", str(cert), "--tls-key", str(key)
        ) as secure,
    ):
        servers = {PLAIN: (plain, None), TLS: (secure, authority.cert)}
        one_row(fixture, hidden, servers)
        bulk(
            fixture, hidden, servers, lambda: engine.throughput(fixture.batch_rows, fixture.seconds)
        )


def one_row(fixture: Fixture, hidden: int, servers: dict) -> None:
    def p50(server: ServerProcess, ca: pathlib.Path | None) -> float:
        plan = LoadPlan(rows=1, seconds=fixture.seconds, channels=1, warmup=50, tls_ca=ca)
        return checked(fixture.load.run(server.grpc, plan), "one row").p50 * 1e6

    contenders = {name: functools.partial(p50, *server) for name, server in servers.items()}
    figures = in_turn(contenders, fixture.rounds_within(BUDGET_S / 3))
    for name, values in figures.items():
        fixture.records.append(
            record_of_rounds(
                f"Service, one row at a time over TCP with {name}, {fixture.shape(hidden)}: p50",
                "us",
                values,
                baseline=None if name == PLAIN else (PLAIN, same_rounds(figures[PLAIN], values)),
            )
        )


def bulk(fixture: Fixture, hidden: int, servers: dict, engine_throughput) -> None:
    """Measures rows per second, and the core-seconds of server and client for each GB of rows."""
    core_seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}

    def rate(name: str, server: ServerProcess, ca: pathlib.Path | None) -> float:
        plan = LoadPlan(
            rows=fixture.batch_rows,
            seconds=fixture.seconds,
            concurrency=max(CHANNELS, fixture.in_flight),
            channels=CHANNELS,
            warmup=2 * CHANNELS,
            retries=RETRIES,
            tls_ca=ca,
        )
        before = server.metric("process_cpu_seconds_total"), client_cpu_seconds()
        load: Load = checked(fixture.load.run(server.grpc, plan), name)
        after = server.metric("process_cpu_seconds_total"), client_cpu_seconds()
        sent = (load.requests + plan.warmup) * fixture.batch_rows * hidden * 2 / 1e9
        core_seconds[name].append(((after[0] - before[0]) / sent, (after[1] - before[1]) / sent))
        return load.rows_per_second

    rates = {name: functools.partial(rate, name, *server) for name, server in servers.items()}
    figures = in_turn(
        {"engine": lambda: engine_throughput()["rows_per_second"]} | rates,
        fixture.rounds_within(BUDGET_S),
    )
    for name in servers:
        server_cost, client_cost = (
            median([costs[side] for costs in core_seconds[name]]) for side in (0, 1)
        )
        say(f"  {name}: {server_cost:.3f} and {client_cost:.3f} core-seconds a GB")
        fixture.records.append(
            record_of_rounds(
                f"Service, TCP with {name}, {CHANNELS} connections, {fixture.shape(hidden)}",
                "rows/s",
                figures[name],
                baseline=("engine alone", same_rounds(figures["engine"], figures[name])),
                note=f"requests of {fixture.batch_rows} rows; {server_cost:.3f} core-seconds a GB of rows in "
                f"the server, {client_cost:.3f} in the client"
                + (f"; target at least {BULK_OF_ENGINE}" if fixture.device == "cuda" else ""),
            )
        )


def client_cpu_seconds() -> float:
    """Returns the CPU time of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
