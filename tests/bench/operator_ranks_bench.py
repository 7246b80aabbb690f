#!/usr/bin/env python3
"""Measures linear_logprob over vocabulary shards on several GPUs, compared with one GPU with the whole head.

    operator_ranks_bench.py --out operator_ranks.json       every GPU of the host, over NCCL
    operator_ranks_bench.py --device cpu --ranks 2 --quick  a dry run over gloo in seconds

There is one process per GPU. Each round runs a forward and backward pass first on one rank with the whole head, while
the other ranks are idle, and then on all ranks with one shard each. Hidden states and per-token gradients are the same
on every rank, and the gradient of hidden is summed over the ranks. The modes are: recomputed or cached logits; sequence
parallelism, where hidden states are gathered and their gradient is scattered; and the mean loss with gradients that are
computed in the forward pass. Times are those of the slowest rank, and GPUs are idle when a measurement starts and ends.
A speedup is the ratio of two times in one round. The exit code is 1 if a figure misses its target; the results are
written in any case.

Needs torch and the library of kernels/torch_ops (LINEAR_LOGPROB_LIBRARY).
"""

import argparse
import functools
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import bench_records
import operator_bench
import torch
import torch.distributed as dist
from e2e.fixture import say
from operator_bench import Inputs, trained
from torch import Tensor

TILE = 192  # columns; shards that start at multiples of it are combined exactly
WARM_UP = 2
SPEEDUP_TARGETS = {2: 1.85, 4: 3.5}  # by number of GPUs
TARGET_HIDDEN_MIN = 4096  # smaller heads have less work for the same waiting time
TARGET_ROWS_MIN = 4096


class Mode(NamedTuple):
    """How a step is computed with the whole head, and the options of a shard."""

    whole: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    options: dict[str, Any] = {}
    is_loss: bool = False
    is_scattered: bool = False


MODES = {
    "operator": Mode(operator_bench.ours, {"memory": "recompute"}),
    operator_bench.KEPT: Mode(operator_bench.kept, {"memory": "cached"}),
    "operator, sequence parallel": Mode(
        operator_bench.ours,
        {"memory": "recompute", "sequence_parallel": True},
        is_scattered=True,
    ),
    operator_bench.MEAN: Mode(
        operator_bench.mean_loss, {"gradients_in_forward": True}, is_loss=True
    ),
}


class Ranks:
    """The process group whose work is measured, and a second one for barriers."""

    def __init__(self, rank: int, size: int, device: str, store: str) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
        )
        self._resting = dist.new_group(backend="gloo")

    def rest(self) -> None:
        """Waits until every rank calls this and its GPU is idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier(self._resting)

    def seconds(self, call: Callable[[], None], *, is_alone: bool) -> float:
        """Returns the time of `call` in seconds, of the slowest rank or, if is_alone, of rank 0."""
        self.rest()
        begin = time.perf_counter()
        if not is_alone or self.rank == 0:
            call()
            if self.device == "cuda":
                torch.cuda.synchronize()
        taken = torch.tensor(0.0 if is_alone and self.rank else time.perf_counter() - begin)
        dist.all_reduce(taken, dist.ReduceOp.MAX, self._resting)
        return taken.item()


def shard_of(vocab: int, rank: int, size: int) -> range:
    """Token ids of the rank: whole tiles, except at the end of the vocabulary."""
    tiles = -(-vocab // TILE)
    first, end = (tiles * part // size * TILE for part in (rank, rank + 1))
    return range(first, min(end, vocab))


def scores_of_shard(
    hidden: Tensor, weight: Tensor, target: Tensor, *, start: int, mode: Mode
) -> tuple[Tensor, ...]:
    call = operator_bench.linear_cross_entropy if mode.is_loss else operator_bench.linear_logprob
    scores = call(
        hidden,
        weight,
        target,
        vocab_start=start,
        process_group=dist.group.WORLD,
        **mode.options,
    )
    return (scores,) if mode.is_loss else scores[:2]


def of_rank(given: Inputs, ranks: Ranks, *, is_scattered: bool) -> tuple[Inputs, int]:
    """The inputs of the rank and its first token id."""
    ids = shard_of(given.weight.shape[0], ranks.rank, ranks.size)
    part = given.weight.detach()[ids.start : ids.stop].clone().requires_grad_()
    hidden = given.hidden.detach()
    if is_scattered:
        hidden = hidden.chunk(ranks.size)[ranks.rank].clone()
    return given._replace(hidden=hidden.requires_grad_(), weight=part), ids.start


def speedup_target(size: int, rows: int, hidden: int) -> str:
    is_large = rows >= TARGET_ROWS_MIN and hidden >= TARGET_HIDDEN_MIN
    target = SPEEDUP_TARGETS.get(size)
    return f"target at least {target}" if target and is_large else ""


def measure(ranks: Ranks, args: argparse.Namespace, shape: tuple[int, int, int]) -> list[dict]:
    rows, hidden, vocab = shape
    name = f"T={rows}, H={hidden}, V={vocab}"
    if ranks.rank == 0:
        say(f"{name}:")
    given = operator_bench.inputs_of(rows, hidden, vocab, args.device)
    records = []
    for mode_name, mode in MODES.items():
        if mode_name == operator_bench.KEPT and not operator_bench.fits_kept(rows, vocab):
            continue
        if mode.is_scattered and rows % ranks.size != 0:
            continue
        mine, start = of_rank(given, ranks, is_scattered=mode.is_scattered)
        alone = functools.partial(trained, mode.whole, given)
        scores = functools.partial(scores_of_shard, start=start, mode=mode)
        together = functools.partial(trained, scores, mine)
        for _ in range(WARM_UP):
            ranks.seconds(alone, is_alone=True)
            ranks.seconds(together, is_alone=False)
        times: list[tuple[float, float]] = []
        for _ in range(args.rounds):
            one = ranks.seconds(alone, is_alone=True)
            times.append((1e3 * one, 1e3 * ranks.seconds(together, is_alone=False)))
        ones, alls = zip(*times, strict=True)
        what = f"{mode_name}, {ranks.size} GPUs, {name}"
        note = "" if args.quick else speedup_target(ranks.size, rows, hidden)
        records += [
            bench_records.record_of_rounds(
                f"Forward and backward, {what}", "ms", list(alls), baseline=("one GPU", list(ones))
            ),
            bench_records.record_of_rounds(
                f"Speedup over one GPU, {what}",
                "times",
                [one / together for one, together in times],
                note=note,
            ),
        ]
        if ranks.rank == 0:
            say(f"  {mode_name}: {statistics.median(ones):.2f} -> {statistics.median(alls):.2f} ms")
        given.hidden.grad = given.weight.grad = None
    return records


def serve(rank: int, args: argparse.Namespace, store: str) -> None:
    ranks = Ranks(rank, args.ranks, args.device, store)
    records: list[dict] = []
    for hidden, vocab, all_rows in operator_bench.heads_and_rows(args):
        for rows in all_rows:
            records += measure(ranks, args, (rows, hidden, vocab))
            if rank == 0 and args.out:
                bench_records.write(records, args.out)
    dist.destroy_process_group()
    if rank == 0:
        has_misses = bench_records.report_misses(records)
        bench_records.write(records, args.out)
        sys.exit(1 if has_misses else 0)


def arguments() -> argparse.Namespace:
    parser = operator_bench.parser_of(__doc__ or "", heads="4096x151936,2048x151936", rounds=7)
    parser.add_argument(
        "--ranks", type=int, help="number of processes; default: the number of GPUs"
    )
    args = operator_bench.parsed(parser)
    args.ranks = args.ranks or torch.cuda.device_count()
    if args.ranks < 2:
        parser.error("this needs several GPUs, or --device cpu --ranks 2")
    return args


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        store = str(pathlib.Path(folder) / "store")
        try:
            torch.multiprocessing.spawn(serve, (args, store), nprocs=args.ranks)
        except torch.multiprocessing.ProcessExitedException as end:
            return end.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
