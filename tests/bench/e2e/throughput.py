"""Rows a second end to end over each transport, against the engine alone."""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable

from bench_records import record_of_rounds
from e2e.fixture import Fixture, Skipped, checked, in_turn, same_rounds, say
from e2e.load import RETRIES, TRANSPORTS, LoadPlan

WANTED = {"tcp": 0.95, "shm": 0.97, "ipc": 0.98}
TCP_CHANNELS = (8, 16)
SHARED_BYTES_PER_REPLICA = 4 << 30
BUDGET_S = 70  # for each hidden size and all transports together
PYTHON_ENDS_WITHIN_S = 60  # of its time: torch starts in some seconds


@dataclasses.dataclass
class Way:
    """Of rows from a client to the engine."""

    name: str
    transport: str
    rate: Callable[[], float]  # rows a second in one round


def measurable(fixture: Fixture, transports: list[str]) -> list[str]:
    """Those that this machine has."""
    if "ipc" in transports and fixture.device != "cuda":
        say("ipc left out: it needs a GPU")
        return [name for name in transports if name != "ipc"]
    return transports


def ways(fixture: Fixture, address: str, transports: list[str], in_flight: int) -> list[Way]:
    """Shared memory and CUDA IPC by both clients, in C++ and in Python."""
    found = []
    if "tcp" in transports:
        for channels in TCP_CHANNELS:
            rate = functools.partial(cli_rate, fixture, address, "tcp", in_flight, channels)
            found.append(Way(f"TCP, {channels} connections", "tcp", rate))
    for transport, name in (("shm", "shared memory"), ("ipc", "CUDA IPC")):
        if transport not in transports:
            continue
        rate = functools.partial(cli_rate, fixture, address, transport, in_flight, 4)
        found.append(Way(f"{name}, one client process", transport, rate))
        rate = functools.partial(python_rate, fixture, address, transport, in_flight)
        found.append(Way(f"{name}, one Python process", transport, rate))
    return found


def measure(fixture: Fixture, transports: list[str], hidden: int) -> None:
    transports = measurable(fixture, transports)
    if not transports:
        raise Skipped("no such transport here")
    options = []
    if transports != ["tcp"]:
        # Clients on this host learn of the socket, and of what it offers, from the server itself.
        options += ["--local", str(fixture.work / f"socket-{hidden}")]
        options += ["--shared-memory-bytes", f"{SHARED_BYTES_PER_REPLICA * fixture.replicas}"]
    options += ["--cuda-ipc"] if "ipc" in transports else []
    in_flight = fixture.in_flight * fixture.replicas
    failures: list[str] = []
    with fixture.engine(hidden) as engine, fixture.server(hidden, *options) as server:

        def engine_rate() -> float:
            # As long as the loads: in its first second a GPU does more than its power lasts for.
            return engine.throughput(fixture.batch_rows, fixture.seconds)["rows_per_second"]

        found = ways(fixture, server.grpc, transports, in_flight)
        contenders = {"engine": engine_rate} | {way.name: way.rate for way in found}
        figures = in_turn(contenders, fixture.rounds_within(BUDGET_S), failures)
        for way in found:
            if figures["engine"] and figures[way.name]:
                add(fixture, hidden, way, figures, in_flight)
        if failures:  # here, so that the server's log is shown
            raise RuntimeError("; ".join(failures))


def add(fixture: Fixture, hidden: int, way: Way, figures: dict, in_flight: int) -> None:
    # TCP may fall short where a row is cheap to score or two GPUs are fed: it is reported.
    is_asked = way.transport != "tcp" or (hidden >= 4096 and fixture.replicas == 1)
    note = f"requests of {fixture.batch_rows} rows, {in_flight} at once"
    if is_asked:
        note += f"; wanted at least {WANTED[way.transport]}"
    fixture.records.append(
        record_of_rounds(
            f"Service, {way.name}, {fixture.shape(hidden)}",
            "rows/s",
            figures[way.name],
            baseline=("engine alone", same_rounds(figures["engine"], figures[way.name])),
            note=note,
        )
    )


def cli_rate(
    fixture: Fixture, address: str, transport: str, in_flight: int, channels: int
) -> float:
    """From one process of logprobctl, whose rows lie on its heap or in its GPU's memory."""
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
    """From one process of the Python client, whose rows lie where they are scored from."""
    script = pathlib.Path(__file__).with_name("python_load.py")
    word, reported = TRANSPORTS[transport]
    arguments = [address, word, str(fixture.batch_rows), f"{fixture.seconds:g}", str(in_flight)]
    try:
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            capture_output=True,
            text=True,
            timeout=fixture.seconds + PYTHON_ENDS_WITHIN_S,
        )
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"python_load did not end in {late.timeout:.0f} s") from None
    if done.returncode != 0:
        raise RuntimeError(f"{transport}: {done.stderr.strip()[-1000:]}")
    answer = json.loads(done.stdout)
    if answer["transport"] != reported:
        raise RuntimeError(f"{reported} was asked for, {answer['transport']} was used")
    return answer["rows_per_second"]
