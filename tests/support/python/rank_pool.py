"""Processes that are the ranks of a gloo group and run functions together."""

import contextlib
import multiprocessing
import pathlib
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

CONTEXT = multiprocessing.get_context("spawn")
ANSWERS_WITHIN_S = 60


def serve(rank: int, size: int, store: str, path: list[str], commands: Any) -> None:
    """Runs one rank: calls each function that it receives, until it receives None."""
    sys.path[:0] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=ANSWERS_WITHIN_S / 2),
    )
    while (command := commands.recv()) is not None:
        function, arguments = command
        try:
            commands.send((function(rank, size, *arguments), None))
        except Exception as error:
            commands.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class RankPool:
    """A pool of `size` ranks, to be used as a context manager. Its processes are killed if one does not answer a call
    within `answers_within_s` seconds."""

    def __init__(
        self, size: int, folder: pathlib.Path, answers_within_s: float = ANSWERS_WITHIN_S
    ) -> None:
        self._answers_within_s = answers_within_s
        pipes = [CONTEXT.Pipe() for _ in range(size)]
        self._commands = [ours for ours, _ in pipes]
        self._processes = [
            CONTEXT.Process(
                target=serve, args=(rank, size, str(folder / "store"), sys.path, theirs)
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def outcomes(self, function: Callable, *arguments: Any) -> list[tuple[Any, str | None]]:
        """Returns (result, error or None) of function(rank, size, *arguments) for each rank."""
        for commands in self._commands:
            commands.send((function, arguments))
        outcomes = []
        for rank, commands in enumerate(self._commands):
            if not commands.poll(self._answers_within_s):
                # Late results would be mistaken for results of later calls.
                for process in self._processes:
                    process.kill()
                raise AssertionError(
                    f"rank {rank} sent no result within {self._answers_within_s:g} s"
                )
            outcomes.append(commands.recv())
        return outcomes

    def results(self, function: Callable, *arguments: Any) -> list[Any]:
        """Returns the result of function(rank, size, *arguments) on each rank. An error on a rank fails the test."""
        outcomes = self.outcomes(function, *arguments)
        for rank, (_, error) in enumerate(outcomes):
            assert error is None, f"rank {rank}: {error}"
        return [result for result, _ in outcomes]

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        for commands in self._commands:
            with contextlib.suppress(OSError):  # The process has been killed.
                commands.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
