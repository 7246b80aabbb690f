#!/usr/bin/env python3
"""Measures linear_logprob over vocabulary shards on several GPUs against one GPU that has the whole head.

    operator_ranks_bench.py --out operator_ranks.json       every GPU of the host, over NCCL
    operator_ranks_bench.py --device cpu --ranks 2 --quick  a dry run over gloo in seconds

One process a GPU. A round is forward and backward of one rank with the whole head, while the others rest, then of
all with a shard each: hidden states and per-token gradients are the same on every rank, and the gradient of hidden
is added up over them. Also with logits kept, with sequence parallelism, where hidden states are gathered and their
gradient is scattered, and the mean loss with gradients formed in the forward. Times are of the slowest rank, from
a rest to a rest; a speedup is taken within a round. Exits 1 when a figure misses what is wanted of it; results are
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

TILE = 192  # columns; shards that begin at multiples of it are added up exactly
WARM_UP = 2
LEAST_WANTED = {2: 1.85, 4: 3.5}
LEAST_WANTED_HIDDEN = 4096  # of smaller heads there is less work beside the same waiting
LEAST_WANTED_ROWS = 4096


class Way(NamedTuple):
    """How a step is computed: with the whole head, and with what options of a shard beside."""

    whole: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    options: dict[str, Any] = {}
    is_loss: bool = False
    is_scattered: bool = False


WAYS = {
    "operator": Way(operator_bench.ours),
    operator_bench.KEPT: Way(operator_bench.kept, {"memory": "cached"}),
    "operator, sequence parallel": Way(
        operator_bench.ours, {"sequence_parallel": True}, is_scattered=True
    ),
    operator_bench.MEAN: Way(
        operator_bench.mean_loss, {"gradients_in_forward": True}, is_loss=True
    ),
}


class Ranks:
    """The process group whose work is measured, and one that only waits."""

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
        """Until every rank is here and its GPU idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier(self._resting)

    def seconds(self, call: Callable[[], None], *, is_alone: bool) -> float:
        """Of the slowest rank, or of the first one alone."""
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
    """Ids of the rank: whole tiles but for the last of all."""
    tiles = -(-vocab // TILE)
    first, end = (tiles * part // size * TILE for part in (rank, rank + 1))
    return range(first, min(end, vocab))


def scores_of_shard(
    hidden: Tensor, weight: Tensor, target: Tensor, *, start: int, way: Way
) -> tuple[Tensor, ...]:
    call = operator_bench.linear_cross_entropy if way.is_loss else operator_bench.linear_logprob
    scores = call(
        hidden,
        weight,
        target,
        vocab_start=start,
        process_group=dist.group.WORLD,
        **way.options,
    )
    return (scores,) if way.is_loss else scores[:2]


def of_rank(given: Inputs, ranks: Ranks, *, is_scattered: bool) -> tuple[Inputs, int]:
    """What the rank holds, and its first id."""
    ids = shard_of(given.weight.shape[0], ranks.rank, ranks.size)
    part = given.weight.detach()[ids.start : ids.stop].clone().requires_grad_()
    hidden = given.hidden.detach()
    if is_scattered:
        hidden = hidden.chunk(ranks.size)[ranks.rank].clone()
    return given._replace(hidden=hidden.requires_grad_(), weight=part), ids.start


def speedup_wanted(size: int, rows: int, hidden: int) -> str:
    is_large = rows >= LEAST_WANTED_ROWS and hidden >= LEAST_WANTED_HIDDEN
    wanted = LEAST_WANTED.get(size)
    return f"wanted at least {wanted}" if wanted and is_large else ""


def measure(ranks: Ranks, args: argparse.Namespace, shape: tuple[int, int, int]) -> list[dict]:
    rows, hidden, vocab = shape
    name = f"T={rows}, H={hidden}, V={vocab}"
    if ranks.rank == 0:
        say(f"{name}:")
    given = operator_bench.inputs_of(rows, hidden, vocab, args.device)
    records = []
    for way_name, way in WAYS.items():
        if way_name == operator_bench.KEPT and not operator_bench.fits_kept(rows, vocab):
            continue
        if way.is_scattered and rows % ranks.size != 0:
            continue
        mine, start = of_rank(given, ranks, is_scattered=way.is_scattered)
        alone = functools.partial(trained, way.whole, given)
        scores = functools.partial(scores_of_shard, start=start, way=way)
        together = functools.partial(trained, scores, mine)
        for _ in range(WARM_UP):
            ranks.seconds(alone, is_alone=True)
            ranks.seconds(together, is_alone=False)
        times: list[tuple[float, float]] = []
        for _ in range(args.rounds):
            one = ranks.seconds(alone, is_alone=True)
            times.append((1e3 * one, 1e3 * ranks.seconds(together, is_alone=False)))
        ones, alls = zip(*times, strict=True)
        what = f"{way_name}, {ranks.size} GPUs, {name}"
        note = "" if args.quick else speedup_wanted(ranks.size, rows, hidden)
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
            say(f"  {way_name}: {statistics.median(ones):.2f} -> {statistics.median(alls):.2f} ms")
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
        is_missed = bench_records.missed(records)
        bench_records.write(records, args.out)
        sys.exit(1 if is_missed else 0)


def arguments() -> argparse.Namespace:
    parser = operator_bench.parser_of(__doc__ or "", heads="4096x151936,2048x151936", rounds=7)
    parser.add_argument("--ranks", type=int, help="processes; default: as many as GPUs")
    args = operator_bench.parsed(parser)
    args.ranks = args.ranks or torch.cuda.device_count()
    if args.ranks < 2:
        parser.error("several GPUs are needed, or --device cpu --ranks 2")
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
