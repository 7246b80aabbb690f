"""Measures rows per second end to end over each transport, compared with the engine alone."""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable

from bench_records import record_of_rounds
from e2e.fixture import Fixture, Skipped, checked, in_turn, same_rounds, say
from e2e.logprobctl import RETRIES, TRANSPORTS, LoadPlan

TARGETS = {"tcp": 0.95, "shm": 0.97, "ipc": 0.98}
TCP_CHANNELS = (8, 16)
SHARED_BYTES_PER_REPLICA = 4 << 30
BUDGET_S = 70  # time for all transports of one hidden size
PYTHON_ENDS_WITHIN_S = 60  # in addition to the measured time; torch takes seconds to start


@dataclasses.dataclass
class Contender:
    """A client and a transport whose throughput is measured."""

    name: str
    transport: str
    rate: Callable[[], float]  # measures rows per second in one round


def measurable(fixture: Fixture, transports: list[str]) -> list[str]:
    """Returns the transports that this machine supports."""
    if "ipc" in transports and fixture.device != "cuda":
        say("ipc is left out: it needs a GPU")
        return [name for name in transports if name != "ipc"]
    return transports


def contenders_of(
    fixture: Fixture, address: str, transports: list[str], in_flight: int
) -> list[Contender]:
    """Returns the contenders. Shared memory and CUDA IPC are measured with the C++ and the Python client."""
    found = []
    if "tcp" in transports:
        for channels in TCP_CHANNELS:
            rate = functools.partial(cli_rate, fixture, address, "tcp", in_flight, channels)
            found.append(Contender(f"TCP, {channels} connections", "tcp", rate))
    for transport, name in (("shm", "shared memory"), ("ipc", "CUDA IPC")):
        if transport not in transports:
            continue
        rate = functools.partial(cli_rate, fixture, address, transport, in_flight, 4)
        found.append(Contender(f"{name}, one client process", transport, rate))
        rate = functools.partial(python_rate, fixture, address, transport, in_flight)
        found.append(Contender(f"{name}, one Python process", transport, rate))
    return found


def measure(fixture: Fixture, transports: list[str], hidden: int) -> None:
    transports = measurable(fixture, transports)
    if not transports:
        raise Skipped("this machine supports none of the transports")
    options = []
    if transports != ["tcp"]:
        options += ["--local", str(fixture.work / f"socket-{hidden}")]
        options += ["--shared-memory-bytes", f"{SHARED_BYTES_PER_REPLICA * fixture.replicas}"]
    options += ["--cuda-ipc"] if "ipc" in transports else []
    in_flight = fixture.in_flight * fixture.replicas
    failures: list[str] = []
    with fixture.engine(hidden) as engine, fixture.server(hidden, *options) as server:

        def engine_rate() -> float:
            # This takes as long as a load, since a GPU is faster in its first second, before its power
            # limit applies.
            return engine.throughput(fixture.batch_rows, fixture.seconds)["rows_per_second"]

        found = contenders_of(fixture, server.grpc, transports, in_flight)
        rates = {"engine": engine_rate} | {contender.name: contender.rate for contender in found}
        figures = in_turn(rates, fixture.rounds_within(BUDGET_S), failures)
        for contender in found:
            if figures["engine"] and figures[contender.name]:
                add(fixture, hidden, contender, figures, in_flight)
        if failures:  # raised inside the context, so that the log of the server is shown
            raise RuntimeError("; ".join(failures))


def add(fixture: Fixture, hidden: int, contender: Contender, figures: dict, in_flight: int) -> None:
    # TCP has no target where rows are cheap to score or where several GPUs share the load.
    has_target = contender.transport != "tcp" or (hidden >= 4096 and fixture.replicas == 1)
    note = f"requests of {fixture.batch_rows} rows, {in_flight} in flight"
    if has_target:
        note += f"; target at least {TARGETS[contender.transport]}"
    fixture.records.append(
        record_of_rounds(
            f"Service, {contender.name}, {fixture.shape(hidden)}",
            "rows/s",
            figures[contender.name],
            baseline=("engine alone", same_rounds(figures["engine"], figures[contender.name])),
            note=note,
        )
    )


def cli_rate(
    fixture: Fixture, address: str, transport: str, in_flight: int, channels: int
) -> float:
    """Returns the throughput of one logprobctl process, whose rows are on its heap or in GPU memory."""
    plan = LoadPlan(
        rows=fixture.batch_rows,
        seconds=fixture.seconds,
        concurrency=in_flight,
        channels=channels,
        transport=transport,
        warmup=2 * in_flight,
        retries=RETRIES,
    )
    return checked(fixture.load.run(address, plan), transport).rows_per_second


def python_rate(fixture: Fixture, address: str, transport: str, in_flight: int) -> float:
    """Returns the throughput of one Python client process, whose rows are in memory that the server reads."""
    script = pathlib.Path(__file__).with_name("python_load.py")
    name, reported = TRANSPORTS[transport]
    arguments = [address, name, str(fixture.batch_rows), f"{fixture.seconds:g}", str(in_flight)]
    try:
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            capture_output=True,
            text=True,
            timeout=fixture.seconds + PYTHON_ENDS_WITHIN_S,
        )
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"python_load did not end within {late.timeout:.0f} s") from None
    if done.returncode != 0:
        raise RuntimeError(f"{transport}: {done.stderr.strip()[-1000:]}")
    answer = json.loads(done.stdout)
    if answer["transport"] != reported:
        raise RuntimeError(f"{reported} was requested, but {answer['transport']} was used")
    return answer["rows_per_second"]
