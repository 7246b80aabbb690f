"""The fixture of a run: programs, models, sizes and time limits that its sections share."""

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


GRACE_S = 30  # for evaluating and cleaning up after a limit


class Skipped(RuntimeError):
    """A section cannot be measured on this machine; the text says why."""


@dataclasses.dataclass
class Fixture:
    binaries: pathlib.Path
    work: pathlib.Path  # folder for models and sockets
    device: str  # "cpu" or "cuda"
    hidden_sizes: list[int]
    vocab: int
    batch_rows: int  # rows of a batch, in the server and the engine alone, and of a bulk request
    rounds: int
    seconds: float  # duration of one load in one round
    replicas: int = 1
    baselines: tuple[str, ...] = ("eager", "compiled")
    in_flight: int = 8  # bulk requests in flight per replica
    deadline: float = float("inf")  # of the whole run, in monotonic time
    smaller_batches: str = ""  # flags of a server with smaller batches
    records: list[dict] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.load = LoadTool(self.binaries)

    def model(self, hidden: int, seed: int = 1) -> pathlib.Path:
        """The folder of a head of that size, which is written at its first use."""
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
        """The engine without a server, with the options of the server's engine."""
        options = ["--device", self.device, *self._engine_options()]
        return EngineBench(self.binaries, "--model", str(self.model(hidden)), *options)

    def server(
        self, hidden: int, *options: str
    ) -> contextlib.AbstractContextManager[ServerProcess]:
        """A running server. `options` of the section override the usual ones."""
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
        """Numbers of rounds. No round starts after `seconds`, except the first."""
        end = self.end_of(seconds)
        for number in range(self.rounds):
            if number and time.monotonic() > end:
                say(f"  stopped after {number} rounds: their time is over")
                return
            yield number

    def end_of(self, seconds: float) -> float:
        """The end of `seconds` from now, or of the whole run if that is earlier."""
        return min(time.monotonic() + seconds, self.deadline)


class OutOfTime(Exception):
    """A time limit has passed."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises OutOfTime once `seconds` have passed. Call it on the main thread."""

    def interrupt(*_: object) -> None:
        # The alarm rings again, since keeping the measurements so far must end too.
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        raise OutOfTime(f"not done in {seconds:.0f} s")

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
    """Returns the load if every request was answered, else raises."""
    if load.errors or not load.requests:
        answered = f"{load.requests} requests were answered, {load.errors} failed"
        raise RuntimeError(f"{what}: {answered}: {load.first_error}")
    return load


def in_turn(
    contenders: Mapping[str, Callable[[], float]],
    rounds: Iterator[int],
    failures: list[str] | None = None,
) -> dict[str, list[float]]:
    """Measures every contender once per round; the order reverses from one round to the next.

    A contender that fails is added to `failures` and left out of later rounds; without `failures` the error
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
            say(f"  stopped in round {number + 1}: the section's time is over")
            break
        parts = (f"{name} {figures[name][-1]:,.4g}" for name in names)
        say(f"  round {number + 1}: {', '.join(parts)}")
    return figures


def same_rounds(others: list[float], figures: list[float]) -> list[float]:
    """The part of `others` from the rounds of `figures`, which may have ended earlier."""
    return others[: len(figures)]


def median(values: list[float]) -> float:
    return statistics.median(values)
