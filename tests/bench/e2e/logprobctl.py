"""Runs `logprobctl bench` and `logprobctl weights`. Only this module knows their flags and JSON."""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
from collections.abc import Iterator

# Two names of each transport: the value of --transport, and the name in a report.
TRANSPORTS = {"tcp": ("tcp", "tcp"), "shm": ("shm", "shm"), "ipc": ("cuda-ipc", "cuda_ipc")}
WINDOWS = 12  # number of windows of a load
# With fewer answers between the first and the last window, the mean of the whole run is more accurate.
STEADY_REQUESTS_MIN = 20
RETRIES = 8  # the client's default; for loads whose latency is not measured
ENDS_WITHIN_S = 30  # allowed in addition to the time limit of the load itself
HEAD = "default"  # of a server with one head
WEIGHTS_END_WITHIN_S = 120


class LoadError(RuntimeError):
    """The load could not be run as requested."""


@dataclasses.dataclass
class Load:
    """The measurements of one load. Times are in seconds."""

    rows_per_second: (
        float  # without the first and the last window, in which the pipeline fills and drains
    )
    requests: int
    errors: int
    first_error: str
    p50: float
    p99: float
    longest: float
    late: int  # requests that the generator sent more than 1 ms late
    transport: str


@dataclasses.dataclass
class LoadPlan:
    """A closed loop of `concurrency` requests, or an open loop of `rate` requests per second."""

    rows: int | str  # rows per request, or a mix such as 1:80,256:20
    seconds: float
    concurrency: int = 1
    rate: float = 0
    channels: int = 4
    transport: str = "tcp"
    fresh: bool = False  # writes new rows for each request
    warmup: int = 4
    retries: int = 0  # retries of a request that is refused or whose connection breaks
    timeout_s: float = 30  # per request
    busy_poll_s: float = 0  # time for which a caller polls for its answer before it sleeps
    tls_ca: pathlib.Path | None = None  # CA of the server's certificate; None: plaintext
    token: str = ""  # for servers that run with --tokens
    head: str = ""  # empty: the only head of the server

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
        flags += ["--fresh"] if self.fresh else []
        flags += ["--head", self.head] if self.head else []
        flags += ["--tls-ca", str(self.tls_ca)] if self.tls_ca else []
        return flags


class LoadTool:
    def __init__(self, binaries: pathlib.Path) -> None:
        self.binary = binaries / "logprobctl"

    def run(self, address: str, plan: LoadPlan) -> Load:
        with self.running(address, plan) as finish:
            return finish()

    def run_parts(self, address: str, plan: LoadPlan, processes: int) -> list[Load]:
        """Runs a closed loop in several processes, each with its part of the clients."""
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
        """Runs a load in the background. Yields a function that waits for its end and returns the Load."""
        process = subprocess.Popen(
            [self.binary, "bench", "--json", "--address", address, *plan.flags()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ({"LOGPROBD_TOKEN": plan.token} if plan.token else {}),
        )
        # The last requests of the warm-up and of the run may each take until their timeout.
        limit = plan.seconds + 2 * plan.timeout_s + ENDS_WITHIN_S

        def finish() -> Load:
            try:
                out, err = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                raise LoadError(f"logprobctl did not end within {limit:.0f} s") from None
            return parse(out, err, plan.transport)

        try:
            yield finish
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def steady_rate(result: dict) -> float:
    """Returns rows per second between the first and the last window, or of the whole run if it has few requests."""
    windows = result["windows"][1:-1]
    if sum(window["requests"] for window in windows) < STEADY_REQUESTS_MIN:
        return result["rows_per_second"]
    rows = sum(window["rows_per_second"] * window["seconds"] for window in windows)
    return rows / sum(window["seconds"] for window in windows)


def parse(out: str, err: str, transport: str) -> Load:
    """Returns the report of a load. Raises LoadError without a report or if `transport` was not used."""
    try:
        result = json.loads(out)["results"][0]
    except (ValueError, KeyError, IndexError):
        raise LoadError(err.strip() or out.strip() or "logprobctl printed no report") from None
    requested, used = TRANSPORTS[transport][1], result["transport"]
    if used not in (requested, None):
        raise LoadError(f"{requested} was requested, but rows were sent over {used}")
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


class WeightsTool:
    """Loads and commits versions of one head of a server, through its admin listener."""

    def __init__(self, binaries: pathlib.Path, admin: str, head: str = HEAD) -> None:
        self.binary = binaries / "logprobctl"
        self.admin = admin
        self.head = head

    def _run(self, *arguments: str) -> str:
        command = [str(self.binary), "weights", *arguments, "--address", self.admin]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=WEIGHTS_END_WITHIN_S
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"logprobctl weights {arguments[0]} did not end") from None
        if done.returncode != 0:
            raise RuntimeError(f"logprobctl weights {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def load(self, version: int, folder: pathlib.Path) -> None:
        """Loads a version in addition to the live one and returns when it can be committed."""
        self._run("load", "--head", self.head, "--version", str(version), str(folder))

    def commit(self) -> None:
        """Makes the loaded version the live one."""
        self._run("commit", "--head", self.head)

    def rollback(self) -> None:
        """Makes the previous version live again."""
        self._run("rollback", "--head", self.head)


def server_flags(root: pathlib.Path) -> list[str]:
    """Returns the flags of a server that may load weights from folders below `root`."""
    return ["--admin", "auto", "--weights-root", str(root)]
