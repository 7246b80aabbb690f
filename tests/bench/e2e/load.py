"""`logprobctl bench` as a tool: the one place that knows its flags and its JSON."""

import contextlib
import dataclasses
import json
import pathlib
import subprocess
from collections.abc import Iterator

# Names of the transports for the flag, and for what a report says was used.
TRANSPORTS = {"tcp": ("tcp", "tcp"), "shm": ("shm", "shm"), "ipc": ("cuda-ipc", "cuda_ipc")}
WINDOWS = 12  # of a load
# Fewer answers between the first window and the last say less than the whole run does.
STEADY_REQUESTS_MIN = 20
RETRIES = 8  # as the client does by itself, where how long a request takes is not the figure
ENDS_WITHIN_S = 30  # of the time that it may take


class LoadError(RuntimeError):
    """The server could not be loaded as it was asked."""


@dataclasses.dataclass
class Load:
    """What one run of a load measured; times in seconds."""

    rows_per_second: float  # between the first window and the last: filling and emptying left out
    requests: int
    errors: int
    first_error: str
    p50: float
    p99: float
    longest: float
    late: int  # sent more than 1 ms late by the generator itself
    transport: str


@dataclasses.dataclass
class LoadPlan:
    """A load: closed loop of `concurrency`, or open loop of `rate` requests a second."""

    rows: int
    seconds: float
    concurrency: int = 1
    rate: float = 0
    channels: int = 4
    transport: str = "tcp"
    stream: bool = False
    warmup: int = 4
    retries: int = 0  # of a request that was refused or whose connection broke
    timeout_s: float = 30  # of a request
    busy_poll_s: float = 0  # how long a caller looks for its answer before it sleeps

    def flags(self) -> list[str]:
        flags = ["--rows", f"{self.rows}", "--duration", f"{self.seconds:g}s"]
        flags += ["--window", f"{self.seconds / WINDOWS:g}s", "--timeout", f"{self.timeout_s:g}s"]
        flags += ["--channels", f"{self.channels}", "--warmup", f"{self.warmup}"]
        flags += ["--retries", f"{self.retries}", "--transport", TRANSPORTS[self.transport][0]]
        if self.rate:
            flags += ["--request-rate", f"{self.rate:g}"]
        else:
            flags += ["--concurrency-range", f"{self.concurrency}"]
        flags += ["--busy-poll", f"{self.busy_poll_s:g}s"] if self.busy_poll_s else []
        return flags + (["--method", "stream"] if self.stream else [])


class LoadTool:
    def __init__(self, binaries: pathlib.Path) -> None:
        self.binary = binaries / "logprobctl"

    def run(self, address: str, plan: LoadPlan) -> Load:
        with self.running(address, plan) as finish:
            return finish()

    def run_parts(self, address: str, plan: LoadPlan, processes: int) -> list[Load]:
        """A closed loop's load by so many processes at once, each with its part of the clients."""
        part = dataclasses.replace(
            plan,
            concurrency=max(1, plan.concurrency // processes),
            channels=max(1, plan.channels // processes),
            warmup=max(1, plan.warmup // processes),
        )
        with contextlib.ExitStack() as loads:
            ends = [loads.enter_context(self.running(address, part)) for _ in range(processes)]
            return [end() for end in ends]

    @contextlib.contextmanager
    def running(self, address: str, plan: LoadPlan) -> Iterator:
        """A load beside other work; the value waits for its end and gives the Load."""
        process = subprocess.Popen(
            [self.binary, "bench", "--json", "--address", address, *plan.flags()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        # A warm-up and a run whose last requests all take as long as they may.
        limit = plan.seconds + 2 * plan.timeout_s + ENDS_WITHIN_S

        def finish() -> Load:
            try:
                out, err = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                raise LoadError(f"logprobctl did not end in {limit:.0f} s") from None
            return parse(out, err, plan.transport)

        try:
            yield finish
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def steady_rate(result: dict) -> float:
    """Rows a second of the windows between the first and the last; of all where these say little."""
    windows = result["windows"][1:-1]
    if sum(window["requests"] for window in windows) < STEADY_REQUESTS_MIN:
        return result["rows_per_second"]
    rows = sum(window["rows_per_second"] * window["seconds"] for window in windows)
    return rows / sum(window["seconds"] for window in windows)


def parse(out: str, err: str, transport: str) -> Load:
    """What a load over `transport` said. LoadError when it says nothing, or took another way."""
    try:
        result = json.loads(out)["results"][0]
    except (ValueError, KeyError, IndexError):
        raise LoadError(err.strip() or out.strip() or "logprobctl said nothing") from None
    wanted, used = TRANSPORTS[transport][1], result["transport"]
    if used not in (wanted, None):
        raise LoadError(f"{wanted} was asked for, rows travelled by {used}")
    return Load(
        rows_per_second=steady_rate(result),
        requests=int(result["requests"]),
        errors=int(result["errors"]),
        first_error=result.get("first_error", ""),
        p50=result["latency_p50_seconds"],
        p99=result["latency_p99_seconds"],
        longest=result["latency_max_seconds"],
        late=int(result["late_by_generator"] or 0),
        transport=used or "",
    )
