"""The fixture of a run: the programs, models, sizes and time limits that its sections share."""

import contextlib
import dataclasses
import pathlib
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from e2e.logprobctl import Load, LoadTool
from e2e.processes import BaselineProcess, EngineBench, running
from e2e.synthetic_head import write_head
from server_process import ServerProcess

GRACE_S = 30  # time for evaluating and cleaning up after a time limit has passed


class Skipped(RuntimeError):
    """A section cannot be measured on this machine; the text says why."""


@dataclasses.dataclass
class Fixture:
    binaries: pathlib.Path
    work: pathlib.Path  # folder for models and sockets
    device: str  # "cpu" or "cuda"
    hidden_sizes: list[int]
    vocab: int
    batch_rows: int  # rows of a batch in the server and in the engine alone, and of a bulk request
    rounds: int
    seconds: float  # duration of one load in one round
    replicas: int = 1
    baselines: tuple[str, ...] = ("eager", "compiled")
    in_flight: int = 8  # bulk requests in flight per replica
    deadline: float = float("inf")  # end of the whole run, in monotonic time
    smaller_batches: str = ""  # flags of a server with smaller batches
    records: list[dict] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.load = LoadTool(self.binaries)

    def model(self, hidden: int, seed: int = 1) -> pathlib.Path:
        """Returns the folder of a head of that size, which is written at its first use."""
        folder = self.work / f"head-{hidden}-{seed}"
        if not folder.exists():
            started = time.monotonic()
            # Renaming makes sure that a half-written head, whose zeros a GPU multiplies faster, is never used.
            part = folder.with_suffix(".part")
            write_head(part, vocab=self.vocab, hidden=hidden, seed=seed).rename(folder)
            say(f"wrote {folder.name} in {time.monotonic() - started:.1f} s")
        return folder

    def _engine_options(self) -> list[str]:
        options = ["--batch-rows", f"{self.batch_rows}", "--replicas", f"{self.replicas}"]
        if self.device == "cuda":
            options += ["--gpus", ",".join(str(gpu) for gpu in range(self.replicas))]
        return options

    def engine(self, hidden: int) -> EngineBench:
        """Returns the engine without a server, with the options of the server's engine."""
        options = ["--device", self.device, *self._engine_options()]
        return EngineBench(self.binaries, "--model", str(self.model(hidden)), *options)

    def server(
        self, hidden: int, *options: str
    ) -> contextlib.AbstractContextManager[ServerProcess]:
        """Returns a context with a running server. `options` override the default ones."""
        usual = ["--model", str(self.model(hidden)), *self._engine_options()]
        if "--batch-rows" in options:
            begin = usual.index("--batch-rows")
            del usual[begin : begin + 2]
        server = ServerProcess(self.binaries, *usual, *options, device=self.device)
        return running(server, "logprobd")

    def baseline(
        self, hidden: int, *options: str
    ) -> contextlib.AbstractContextManager[ServerProcess]:
        """Returns a context with a running baseline_server.py."""
        server = BaselineProcess(self.model(hidden), self.device, *options)
        return running(server, "baseline_server")

    def shape(self, hidden: int) -> str:
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"H={hidden}, V={self.vocab}{replicas}"

    def rounds_within(self, seconds: float) -> Iterator[int]:
        """Yields the numbers of the rounds. No round except the first starts after `seconds`."""
        end = self.end_of(seconds)
        for number in range(self.rounds):
            if number and time.monotonic() > end:
                say(f"  stopped after {number} rounds: the time limit is reached")
                return
            yield number

    def end_of(self, seconds: float) -> float:
        """Returns the end of `seconds` from now, or of the whole run if that is earlier."""
        return min(time.monotonic() + seconds, self.deadline)


class OutOfTime(Exception):
    """A time limit has passed."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises OutOfTime once `seconds` have passed. Must be called on the main thread."""

    def interrupt(*_: object) -> None:
        # The timer is started again, since storing the measurements so far has a time limit too.
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        raise OutOfTime(f"did not finish within {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def checked(load: Load, what: str) -> Load:
    """Returns the load if every request was answered, otherwise raises RuntimeError."""
    if load.errors or not load.requests:
        answered = f"{load.requests} requests were answered, {load.errors} failed"
        raise RuntimeError(f"{what}: {answered}: {load.first_error}")
    return load


def in_turn(
    contenders: Mapping[str, Callable[[], float]],
    rounds: Iterator[int],
    failures: list[str] | None = None,
) -> dict[str, list[float]]:
    """Measures every contender once per round. The order is reversed from one round to the next.

    A contender that fails is added to `failures` and left out of later rounds. Without `failures` the error
    is raised. When the time of the section ends, the figures of earlier rounds are kept.
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
            say(f"  stopped in round {number + 1}: the section's time limit is reached")
            break
        parts = (f"{name} {figures[name][-1]:,.4g}" for name in names)
        say(f"  round {number + 1}: {', '.join(parts)}")
    return figures


def same_rounds(others: list[float], figures: list[float]) -> list[float]:
    """Returns the figures of `others` from the rounds that `figures` has, which may be fewer."""
    return others[: len(figures)]


def median(values: list[float]) -> float:
    return statistics.median(values)
