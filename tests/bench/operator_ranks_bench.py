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

import bench_records
import operator_bench
import torch
import torch.distributed as dist
from e2e.scene import say
from operator_bench import Inputs, trained
from torch import Tensor

TILE = 192  # columns; shards that begin at multiples of it are added up exactly
WARM_UP = 2
LEAST_WANTED = {2: 1.85, 4: 3.5}
LEAST_WANTED_HIDDEN = 4096  # of smaller heads there is less work beside the same waiting
LEAST_WANTED_ROWS = 4096
WAYS = {
    "operator": {},
    "operator, logits kept": {"memory": "cached"},
    "operator, sequence parallel": {"sequence_parallel": True},
    operator_bench.MEAN: {"gradients_in_forward": True},
}
WHOLE = {
    "operator, logits kept": operator_bench.kept,
    operator_bench.MEAN: operator_bench.mean_loss,
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
    hidden: Tensor, weight: Tensor, target: Tensor, *, start: int, options: dict
) -> tuple[Tensor, ...]:
    is_loss = "gradients_in_forward" in options
    call = operator_bench.linear_cross_entropy if is_loss else operator_bench.linear_logprob
    scores = call(
        hidden,
        weight,
        target,
        vocab_start=start,
        process_group=dist.group.WORLD,
        **options,
    )
    return (scores,) if is_loss else scores[:2]


def of_rank(given: Inputs, ranks: Ranks, *, sequence_parallel: bool) -> tuple[Inputs, int]:
    """What the rank holds, and its first id."""
    ids = shard_of(given.weight.shape[0], ranks.rank, ranks.size)
    part = given.weight.detach()[ids.start : ids.stop].clone().requires_grad_()
    hidden = given.hidden.detach()
    if sequence_parallel:
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
    for way, options in WAYS.items():
        is_scattered = "sequence_parallel" in options
        if ("memory" in options and 2.1 * rows * vocab > operator_bench.KEPT_BYTES_MAX) or (
            is_scattered and rows % ranks.size != 0
        ):
            continue
        mine, start = of_rank(given, ranks, sequence_parallel=is_scattered)
        alone = functools.partial(trained, WHOLE.get(way, operator_bench.ours), given)
        scores = functools.partial(scores_of_shard, start=start, options=options)
        together = functools.partial(trained, scores, mine)
        for _ in range(WARM_UP):
            ranks.seconds(alone, is_alone=True)
            ranks.seconds(together, is_alone=False)
        times: list[tuple[float, float]] = []
        for _ in range(args.rounds):
            one = ranks.seconds(alone, is_alone=True)
            times.append((1e3 * one, 1e3 * ranks.seconds(together, is_alone=False)))
        ones, alls = zip(*times, strict=True)
        what = f"{way}, {ranks.size} GPUs, {name}"
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
            say(f"  {way}: {statistics.median(ones):.2f} -> {statistics.median(alls):.2f} ms")
        given.hidden.grad = given.weight.grad = None
    return records


def serve(rank: int, args: argparse.Namespace, store: str) -> None:
    ranks = Ranks(rank, args.ranks, args.device, store)
    bench_records.ORIGIN.update(
        machine=bench_records.machine(with_gpu=args.device == "cuda"),
        commit=args.commit or bench_records.commit(),
    )
    records: list[dict] = []
    for head in args.heads.split(","):
        hidden, vocab = (int(size) for size in head.split("x"))
        for rows in args.rows.split(","):
            records += measure(ranks, args, (int(rows), hidden, vocab))
            if rank == 0 and args.out:
                bench_records.write(records, args.out)
    dist.destroy_process_group()
    if rank == 0:
        is_missed = bench_records.missed(records)
        bench_records.write(records, args.out)
        sys.exit(1 if is_missed else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, help="JSON to write; default: standard output")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, help="processes; default: as many as GPUs")
    parser.add_argument("--heads", default="4096x151936,2048x151936", help="HxV,...")
    parser.add_argument("--rows", default="1024,4096,16384", help="tokens of a step, T,...")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--quick", action="store_true", help="a small head; nothing is wanted of it"
    )
    parser.add_argument("--commit", help="where there is no git; default: HEAD, -dirty if changed")
    args = parser.parse_args()
    args.ranks = args.ranks or torch.cuda.device_count()
    if args.ranks < 2:
        parser.error("several GPUs are needed, or --device cpu --ranks 2")
    if args.quick:
        args.heads, args.rows, args.rounds = "64x2048", "128", 2
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
