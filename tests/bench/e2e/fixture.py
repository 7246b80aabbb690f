"""What the sections of a run share: where things are, what is measured, how long they may take."""

import contextlib
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from e2e.load import Load, LoadTool
from e2e.made_head import write_head
from e2e.processes import BaselineProcess, EngineBench, running
from e2e.time_limit import OutOfTime
from server_process import ServerProcess


class Skipped(RuntimeError):
    """A section cannot be measured here; the text says why."""


@dataclasses.dataclass
class Fixture:
    binaries: pathlib.Path
    work: pathlib.Path  # a folder for models and sockets, removed at the end
    device: str  # "cpu" or "cuda"
    hidden_sizes: list[int]
    vocab: int
    batch_rows: int  # of the server and of the engine alone; bulk requests have as many
    rounds: int
    seconds: float  # of one load in one round
    replicas: int = 1
    baselines: tuple[str, ...] = ("eager", "compiled")
    in_flight: int = 8  # bulk requests at once, for each replica
    deadline: float = float("inf")  # monotonic; of the whole run
    cut_smaller: str = ""  # flags of a server that cuts bulk batches smaller
    records: list[dict] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.load = LoadTool(self.binaries)

    def model(self, hidden: int, seed: int = 1) -> pathlib.Path:
        """A head of that size, made when it is first asked for."""
        folder = self.work / f"head-{hidden}-{seed}"
        if not folder.exists():
            started = time.monotonic()
            # One that was left half written would be scored as zeros, which a GPU multiplies faster.
            part = folder.with_suffix(".part")
            write_head(part, vocab=self.vocab, hidden=hidden, seed=seed).rename(folder)
            say(f"made {folder.name} in {time.monotonic() - started:.1f} s")
        return folder

    def _engine_options(self) -> list[str]:
        options = ["--batch-rows", f"{self.batch_rows}", "--replicas", f"{self.replicas}"]
        if self.device == "cuda":
            options += ["--gpus", ",".join(str(gpu) for gpu in range(self.replicas))]
        return options

    def engine(self, hidden: int) -> EngineBench:
        """The engine alone, set up as the server's."""
        options = ["--device", self.device, *self._engine_options()]
        return EngineBench(self.binaries, "--model", str(self.model(hidden)), *options)

    def server(
        self, hidden: int, *options: str
    ) -> contextlib.AbstractContextManager[ServerProcess]:
        """A running server, with further options of the section's, which win."""
        usual = ["--model", str(self.model(hidden)), *self._engine_options()]
        if "--batch-rows" in options:
            begin = usual.index("--batch-rows")
            del usual[begin : begin + 2]
        server = ServerProcess(self.binaries, *usual, *options, device=self.device)
        return running(server, "logprobd")

    def baseline(
        self, hidden: int, *options: str
    ) -> contextlib.AbstractContextManager[ServerProcess]:
        """A running baseline_server.py."""
        server = BaselineProcess(self.model(hidden), self.device, *options)
        return running(server, "baseline_server")

    def shape(self, hidden: int) -> str:
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"H={hidden}, V={self.vocab}{replicas}"

    def rounds_within(self, seconds: float) -> Iterator[int]:
        """Numbers of rounds; none is begun after `seconds`, but there is always one."""
        end = self.end_of(seconds)
        for number in range(self.rounds):
            if number and time.monotonic() > end:
                say(f"  stopped after {number} rounds: the time for them is over")
                return
            yield number

    def end_of(self, seconds: float) -> float:
        """When that time from now is over, or that of the whole run."""
        return min(time.monotonic() + seconds, self.deadline)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def checked(load: Load, what: str) -> Load:
    """The load, if every request was answered."""
    if load.errors or not load.requests:
        answered = f"{load.requests} requests were answered, {load.errors} failed"
        raise RuntimeError(f"{what}: {answered}: {load.first_error}")
    return load


def in_turn(
    contenders: Mapping[str, Callable[[], float]],
    rounds: Iterator[int],
    failures: list[str] | None = None,
) -> dict[str, list[float]]:
    """Every contender once a round, in an order that turns over from one round to the next.

    With `failures` one that fails is noted there and takes no further part; else it ends the section.
    When the section's time ends, what earlier rounds gave is kept.
    """
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in rounds:
        try:
            for name in list(names if number % 2 == 0 else reversed(names)):
                try:
                    figures[name].append(contenders[name]())
                except RuntimeError as error:
                    if failures is None:
                        raise
                    say(f"  {name} FAILED: {error}")
                    failures.append(f"{name}: {error}")
                    names.remove(name)
        except OutOfTime:
            if number == 0:
                raise
            say(f"  stopped in round {number + 1}: the section's time is over")
            break
        parts = (f"{name} {figures[name][-1]:,.4g}" for name in names)
        say(f"  round {number + 1}: {', '.join(parts)}")
    return figures


def same_rounds(others: list[float], figures: list[float]) -> list[float]:
    """Those of `others` that were taken beside `figures`, which may have ended earlier."""
    return others[: len(figures)]


def median(values: list[float]) -> float:
    return statistics.median(values)
