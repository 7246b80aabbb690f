"""Runs metrics_fixture.cc, the HTTP side of a server with two heads on two simulated GPUs."""

import pathlib
import subprocess
import urllib.request


class MetricsFixture:
    """A running metrics_fixture; `http` is its address. Use it as a context manager."""

    def __init__(self, binaries: pathlib.Path) -> None:
        self.program = binaries.parent / "tests" / "metrics_fixture"
        assert self.program.exists(), f"{self.program} is missing; build it"

    def __enter__(self) -> "MetricsFixture":
        self.process = subprocess.Popen(
            [self.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.http = self.process.stdout.readline().strip().removeprefix("http=")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        assert self.process.wait(20) == 0
        self.process.stdout.close()

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=5) as reply:
            return reply.read().decode()
