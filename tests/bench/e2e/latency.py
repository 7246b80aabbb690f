"""The latency of one row at low load, and of small requests next to a bulk load."""

import functools
import itertools
import time

from bench_records import record_of_rounds
from e2e.fixture import Fixture, checked, in_turn, median, say
from e2e.logprobctl import RETRIES, Load, LoadPlan

P50_ABOVE_ENGINE_US = 250  # targets
P99_ABOVE_ENGINE_US = 600
SMALL_RATE = 200  # requests per second
SMALL_ROWS = 1
BULK_IN_FLIGHT = 4
SMALL_P99_BATCHES = 3.3  # target, as a multiple of the time of a batch
SMALL_P99_BATCHES_SMALLER = 3  # target with smaller batches
LEAD_S = 0.5  # time for the bulk load to fill the queue
BUDGET_S = 45
CALLERS = {"": 0, ", busy-polls for its answer": 0.005}  # busy_poll_s


def one_row(fixture: Fixture) -> None:
    """Measures how much time the service adds to the engine's time for a row, with one request in flight."""
    hidden = fixture.hidden_sizes[0]
    with fixture.engine(hidden) as engine, fixture.server(hidden) as server:
        loads: dict[str, list[Load]] = {caller: [] for caller in CALLERS}

        def engine_p50() -> float:
            return engine.latency(1, max(50, int(200 * fixture.seconds)))["p50"] * 1e6

        def service(caller: str) -> float:
            plan = LoadPlan(rows=1, seconds=fixture.seconds, channels=1, warmup=50)
            plan.busy_poll_s = CALLERS[caller]
            loads[caller].append(checked(fixture.load.run(server.grpc, plan), "one row"))
            return loads[caller][-1].p50 * 1e6

        contenders = {f"service{caller}": functools.partial(service, caller) for caller in CALLERS}
        figures = in_turn({"engine": engine_p50} | contenders, fixture.rounds_within(BUDGET_S))
    engine_us = median(figures["engine"])
    for caller, name in itertools.product(CALLERS, ("p50", "p99")):
        limit = {"p50": P50_ABOVE_ENGINE_US, "p99": P99_ABOVE_ENGINE_US}[name]
        above = [1e6 * getattr(load, name) - engine_us for load in loads[caller]]
        fixture.records.append(
            record_of_rounds(
                f"Service, one row at a time over TCP{caller}, {fixture.shape(hidden)}: "
                f"{name} above the engine's p50",
                "us",
                above,
                note=f"engine {engine_us:.0f} us, service {engine_us + median(above):.0f} us; "
                f"target at most {limit}",
            )
        )


def small_beside_bulk(fixture: Fixture) -> None:
    """Measures the p99 of small requests at a steady rate during a bulk load, as a multiple of a batch's time."""
    hidden = fixture.hidden_sizes[0]
    kinds: dict[str, tuple[list[str], float]] = {"default": ([], SMALL_P99_BATCHES)}
    kinds[fixture.smaller_batches] = (fixture.smaller_batches.split(), SMALL_P99_BATCHES_SMALLER)
    for kind, (options, limit) in kinds.items():
        with fixture.engine(hidden) as engine, fixture.server(hidden, *options) as server:
            batches: list[float] = []
            bulk_rates: list[float] = []
            p99s: list[float] = []
            late = 0
            for _ in fixture.rounds_within(BUDGET_S / len(kinds)):
                batch = engine.throughput(fixture.batch_rows, fixture.seconds / 2)["batch_seconds"]
                batches.append(batch)
                small, bulk_rate = load_both(fixture, server.grpc)
                p99s.append(small.p99)
                bulk_rates.append(bulk_rate)
                late += small.late
                say(f"  {kind}: p99 {1e3 * small.p99:.2f} ms, batch time {1e3 * batch:.2f} ms")
        batch_s = median(batches)
        fixture.records.append(
            record_of_rounds(
                f"Service, {SMALL_RATE} requests per second of {SMALL_ROWS} row next to bulk, "
                f"{fixture.shape(hidden)}, {kind}: small p99",
                "batch times",
                [p99 / batch_s for p99 in p99s],
                note=f"a batch of {fixture.batch_rows} rows takes {1e3 * batch_s:.2f} ms; "
                f"p99 {1e3 * median(p99s):.2f} ms; bulk {median(bulk_rates):,.0f} rows/s at the same time; "
                f"{late} were sent late by the load generator; "
                f"target at most {limit}",
            )
        )


def load_both(fixture: Fixture, address: str):
    """Runs small requests during a bulk load; returns the small Load and the rows per second of the bulk."""
    seconds = 2 * fixture.seconds
    bulk_plan = LoadPlan(
        rows=fixture.batch_rows,
        seconds=seconds + 2 * LEAD_S,
        concurrency=BULK_IN_FLIGHT,
        channels=8,
        retries=RETRIES,
    )
    small_plan = LoadPlan(rows=SMALL_ROWS, seconds=seconds, rate=SMALL_RATE, channels=2)
    with fixture.load.running(address, bulk_plan) as bulk:
        time.sleep(LEAD_S)
        small = checked(fixture.load.run(address, small_plan), "small requests")
        return small, checked(bulk(), "bulk").rows_per_second
