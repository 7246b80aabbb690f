"""Rows a second end to end over each transport, against the engine alone."""

import functools
import json
import pathlib
import subprocess
import sys

from bench_records import record_of_rounds
from e2e import python_load
from e2e.load import ENDS_WITHIN_S, LoadPlan
from e2e.scene import Scene, Skipped, checked, in_turn, say

WANTED = {"tcp": 0.95, "shm": 0.97, "ipc": 0.98}
NAMES = {
    "tcp": "TCP, {channels} connections",
    "shm": "shared memory, one client process",
    "ipc": "CUDA IPC, one client process",
}
TCP_CHANNELS = (8, 16)
REQUESTS_IN_FLIGHT = 8  # for each replica: with 4 the way there and back keeps the GPU waiting
BUDGET_S = 65  # for each hidden size and all transports together


def measurable(scene: Scene, transports: list[str]) -> list[str]:
    """Those that this build and machine have."""
    found = []
    for transport in transports:
        if transport == "ipc" and scene.device != "cuda":
            say("ipc left out: it needs a GPU")
        elif not scene.load.has_transport(transport) and not python_load.has_transport(transport):
            say(f"{transport} left out: neither logprobctl bench nor the Python client has it")
        else:
            found.append(transport)
    return found


def measure(scene: Scene, transports: list[str]) -> None:
    transports = measurable(scene, transports)
    if not transports:
        raise Skipped("no such transport here")
    for hidden in scene.hidden_sizes:
        measure_size(scene, hidden, transports)


def measure_size(scene: Scene, hidden: int, transports: list[str]) -> None:
    # Clients on this host learn of the socket, and of what it offers, from the server itself.
    socket = ["--local", str(scene.work / f"socket-{hidden}")]
    options = [] if transports == ["tcp"] else socket
    options += ["--cuda-ipc"] if "ipc" in transports else []
    in_flight = REQUESTS_IN_FLIGHT * scene.replicas
    with scene.engine(hidden) as engine, scene.server(hidden, *options) as server:

        def engine_rate() -> float:
            return engine.throughput(scene.batch_rows, scene.seconds / 2)["rows_per_second"]

        def rate(transport: str, channels: int) -> float:
            if not scene.load.has_transport(transport):
                return python_rate(scene, server.grpc, transport, in_flight)
            plan = LoadPlan(
                rows=scene.batch_rows,
                seconds=scene.seconds,
                concurrency=in_flight,
                channels=channels,
                transport=transport,
            )
            return checked(scene.load.run(server.grpc, plan), transport).rows_per_second

        contenders = {"engine": engine_rate}
        for transport in transports:
            for channels in TCP_CHANNELS if transport == "tcp" else (4,):
                name = NAMES[transport].format(channels=channels)
                contenders[name] = functools.partial(rate, transport, channels)
        failures: list[str] = []
        figures = in_turn(contenders, scene.rounds_within(BUDGET_S), failures)
    for name in contenders:
        if name == "engine" or not figures[name]:
            continue
        transport = next(key for key in NAMES if NAMES[key].split(",")[0] == name.split(",")[0])
        # TCP may fall short where a row is cheap to score or two GPUs are fed: it is reported.
        is_asked = transport != "tcp" or (hidden >= 4096 and scene.replicas == 1)
        note = f"requests of {scene.batch_rows} rows, {in_flight} at once"
        if is_asked:
            note += f"; wanted at least {WANTED[transport]}"
        scene.records.append(
            record_of_rounds(
                f"Service, {name}, {scene.shape(hidden)}",
                "rows/s",
                figures[name],
                baseline=("engine alone", figures["engine"]),
                note=note,
            )
        )
    if failures:
        raise RuntimeError("; ".join(failures))


def python_rate(scene: Scene, address: str, transport: str, in_flight: int) -> float:
    """As a load of logprobctl, from one process of the Python client."""
    script = pathlib.Path(python_load.__file__)
    arguments = [address, transport, str(scene.batch_rows), f"{scene.seconds:g}", str(in_flight)]
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=scene.seconds + ENDS_WITHIN_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{transport}: {done.stderr.strip()}")
    answer = json.loads(done.stdout)
    if answer["transport"].replace("cuda_", "") != transport:
        raise RuntimeError(f"{transport} was asked for, {answer['transport']} was used")
    return answer["rows_per_second"]
