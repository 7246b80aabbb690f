"""`logprobctl bench` as a tool: the one place that knows its flags and its JSON."""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
from collections.abc import Iterator

# Flags of the client for each transport; a transport whose flags logprobctl lacks is not measured.
# "tcp" is asked for by the environment, since a client on the server's host would else share memory.
TRANSPORT_FLAGS = {"tcp": [], "shm": ["--transport", "shm"], "ipc": ["--transport", "cuda-ipc"]}
STREAM_FLAGS = ["--method", "stream"]
ENDS_WITHIN_S = 60  # of its planned end


class LoadError(RuntimeError):
    """logprobctl could not load the server at all."""


@dataclasses.dataclass
class Load:
    """What one run of a load measured; times in seconds."""

    rows_per_second: float
    requests: int
    errors: int
    first_error: str
    p50: float
    p99: float
    longest: float


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

    def flags(self) -> list[str]:
        flags = ["--rows", f"{self.rows}", "--duration", f"{self.seconds:g}s"]
        flags += ["--channels", f"{self.channels}", "--warmup", f"{self.warmup}"]
        flags += ["--retries", f"{self.retries}"]
        if self.rate:
            flags += ["--request-rate", f"{self.rate:g}"]
        else:
            flags += ["--concurrency-range", f"{self.concurrency}"]
        return flags + TRANSPORT_FLAGS[self.transport] + (STREAM_FLAGS if self.stream else [])


class LoadTool:
    def __init__(self, binaries: pathlib.Path) -> None:
        self.binary = binaries / "logprobctl"
        command = [str(self.binary), "bench", "--help"]
        self._help = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def has(self, flags: list[str]) -> bool:
        """Whether this logprobctl takes these flags, by its help."""
        return all(flag in self._help for flag in flags)

    def has_transport(self, transport: str) -> bool:
        return self.has(TRANSPORT_FLAGS[transport])

    def has_stream(self) -> bool:
        return self.has(STREAM_FLAGS)

    def run(self, address: str, plan: LoadPlan) -> Load:
        with self.running(address, plan) as finish:
            return finish()

    @contextlib.contextmanager
    def running(self, address: str, plan: LoadPlan) -> Iterator:
        """A load beside other work; the value waits for its end and gives the Load."""
        process = subprocess.Popen(
            [self.binary, "bench", "--json", "--address", address, *plan.flags()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ({"LOGPROBD_TRANSPORT": "tcp"} if plan.transport == "tcp" else {}),
        )

        def finish() -> Load:
            out, err = process.communicate(timeout=plan.seconds + ENDS_WITHIN_S)
            return parse(out, err)

        try:
            yield finish
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def parse(out: str, err: str) -> Load:
    try:
        result = json.loads(out)["results"][0]
    except (ValueError, KeyError, IndexError):
        raise LoadError(err.strip() or out.strip() or "logprobctl said nothing") from None
    return Load(
        rows_per_second=result["rows_per_second"],
        requests=int(result["requests"]),
        errors=int(result["errors"]),
        first_error=result.get("first_error", ""),
        p50=result["latency_p50_seconds"],
        p99=result["latency_p99_seconds"],
        longest=result["latency_max_seconds"],
    )
