#!/usr/bin/env python3
"""Measures linear_logprob forward and backward, compared with three GEMMs of the same size, in one run.

    operator_bench.py --out operator.json             all default heads and rows, on a GPU
    operator_bench.py --heads 4096x151936 --rows 8192  one head with one number of rows
    operator_bench.py --device cpu --quick             a trial run that takes seconds

Each round runs all contenders in a different order, because the GPU's clock is higher after a contender that leaves
it idle. The contenders are: three bf16 GEMMs (the logits, and their products with weight and hidden); the operator
with a gradient for each token's logprob and entropy, with logits recomputed or cached (if they do not fit into 4 GiB,
for as many rows as fit); the mean loss with gradients computed in the forward; the same in torch with materialised
logits, eager and compiled; and the other packages that
can be imported (operator_peers.py). With 70 % of the rows ignored, the GEMMs of the remaining rows show the
possible gain. A call starts on an idle GPU, so its time includes the time that the host takes. For few rows, where the
host's time matters, the benchmark also measures consecutive steps, as in a trainer, and calls in a CUDA graph, which
do not need the host. Figures are medians over the rounds. Extra memory is the peak of a call beyond its inputs and
gradients. Exits with 1 if a figure misses its target; results are written in any case.

Needs torch and the library of kernels/torch_ops (LINEAR_LOGPROB_LIBRARY).
"""

import argparse
import functools
import pathlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "kernels/torch_ops/python"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support" / "python"))

import bench_records
import torch
from e2e.fixture import in_turn, say
from linear_logprob_reference import reference
from logprobd_ops import linear_cross_entropy, linear_logprob
from operator_peers import FAST_PEERS, importable
from torch import Tensor

WARM_UP = 2
IGNORED_SHARE = 0.7
LOGIT_DEVIATION = 3.0
EXTRA_MIB = 256  # allowed in addition to the fp32 sum for hidden
GEMMS = "three GEMMs"
KEPT = "operator, logits kept"
PARTIAL = "operator, logits kept in part"
MEAN = "operator, mean loss, gradients in the forward"
IGNORED = "operator, 70 % of rows ignored"
GEMMS_LEFT = "three GEMMs of 30 % of the rows"
IN_GRAPH = ", in a CUDA graph"
IN_A_ROW = ", steps in a row"
STEPS_IN_A_ROW = 8
KEPT_BYTES_MAX = 4 << 30
TORCH_LOGITS_MAX = 1 << 30  # logits of eager torch, about 30 GB
SLOW_PEER_ROWS_MAX = 4096
FEW_ROWS_MAX = 4096  # with more rows the host is far ahead of the GPU
ERROR_ROWS = 250  # no power of two, by which a mean loss would be divided exactly
ERROR_MAX = 2.5e-3


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor
    d_logprob: Tensor
    d_entropy: Tensor


def inputs_of(rows: int, hidden: int, vocab: int, device: str) -> Inputs:
    """Returns inputs whose logits have a standard deviation of LOGIT_DEVIATION."""
    generator = torch.Generator(device=device).manual_seed(1)
    normal = functools.partial(torch.randn, device=device, generator=generator)
    weight = normal(vocab, hidden).mul_(LOGIT_DEVIATION / hidden**0.5).bfloat16()
    return Inputs(
        normal(rows, hidden).bfloat16().requires_grad_(),
        weight.requires_grad_(),
        torch.randint(0, vocab, (rows,), device=device, generator=generator),
        normal(rows),
        normal(rows) * 0.01,
    )


def three_gemms(given: Inputs) -> None:
    hidden, weight = given.hidden.detach(), given.weight.detach()
    logits = hidden @ weight.T
    _ = logits @ weight
    _ = logits.T @ hidden


def in_memory(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the same scores from materialised logits."""
    log_p = torch.log_softmax((hidden @ weight.T).float(), -1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def in_double(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    scores = reference(hidden, weight, target)
    return scores.logprob, scores.entropy


def ours(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logprob, entropy, *_ = linear_logprob(hidden, weight, target, memory="recompute")
    return logprob, entropy


def kept(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logprob, entropy, *_ = linear_logprob(hidden, weight, target, memory="cached")
    return logprob, entropy


def partly_kept(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logprob, entropy, *_ = linear_logprob(
        hidden, weight, target, memory="auto", memory_budget=KEPT_BYTES_MAX
    )
    return logprob, entropy


def fits_kept(rows: int, vocab: int) -> bool:
    """Returns whether the cache has room for the logits, about 2.1 bytes each."""
    return 2.1 * rows * vocab <= KEPT_BYTES_MAX


def mean_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return (linear_cross_entropy(hidden, weight, target, gradients_in_forward=True),)


def mean_loss_in_memory(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return (-in_memory(hidden, weight, target)[0].mean(),)


def mean_loss_in_double(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return (-in_double(hidden, weight, target)[0].mean(),)


def forward_of(scores: Callable[..., tuple[Tensor, ...]], given: Inputs) -> None:
    with torch.no_grad():
        scores(given.hidden, given.weight, given.target)


def trained(scores: Callable, given: Inputs) -> None:
    """Runs forward and backward, with a gradient for each token unless the score is one loss."""
    given.hidden.grad = given.weight.grad = None
    outputs = scores(given.hidden, given.weight, given.target)
    upstream = [given.d_logprob, given.d_entropy][: len(outputs)]
    if outputs[0].dim() == 0:
        outputs[0].backward()
    else:
        torch.autograd.backward(
            outputs, [g.to(o.dtype) for g, o in zip(upstream, outputs, strict=True)]
        )


def seconds(call: Callable[[], None], device: str) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def step_ms(name: str, call: Callable[[], None], device: str) -> float:
    steps = STEPS_IN_A_ROW if name.endswith(IN_A_ROW) else 1
    return 1e3 * seconds(call, device) / steps


def extra_mib(call: Callable[[], None], given: Inputs) -> float:
    """Returns the peak memory of a call, in MiB, beyond the gradients that it leaves allocated."""
    given.hidden.grad = given.weight.grad = None
    call()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    given.hidden.grad = given.weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - after) / 2**20


def timed_rounds(
    calls: dict[str, Callable[[], None]],
    device: str,
    rounds: int,
    measured: Callable[[str, Callable[[], None], str], float] = step_ms,
) -> dict[str, list[float]]:
    """Returns the milliseconds of each call in each round. A round makes all calls in a different order."""
    milliseconds: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(1)
    for number in range(rounds):
        timed = {
            name: functools.partial(measured, name, calls[name], device)
            for name in order.sample(list(calls), len(calls))
        }
        for name, figures in in_turn(timed, iter([number])).items():
            milliseconds[name] += figures
    return milliseconds


def records_with_targets(
    calls: dict[str, Callable[[], None]],
    targets: dict[str, tuple[str, float]],
    shape: str,
    args: argparse.Namespace,
) -> list[dict]:
    """Times the calls. Returns a record for each name of `targets`, which gives its baseline and largest ratio."""
    for call in calls.values():
        warmed_up(call)
    milliseconds = timed_rounds(calls, args.device, args.rounds)
    return [
        bench_records.record_of_rounds(
            f"{name}, {shape}",
            "ms",
            milliseconds[name],
            baseline=(baseline, milliseconds[baseline]),
            note="" if args.quick else f"target at most {limit}",
        )
        for name, (baseline, limit) in targets.items()
    ]


def able(
    contenders: dict[str, Callable[[], None]],
    prepared: Callable[[Callable[[], None]], Callable[[], None]],
) -> dict[str, Callable[[], None]]:
    """Returns the contenders, prepared, without those that fail, for example for lack of memory."""
    found = {}
    for name, call in contenders.items():
        try:
            found[name] = prepared(call)
        except Exception as error:  # Other packages refuse shapes with errors of their own.
            # The error of a failed capture has the reason in its context.
            say(f"  {name} is left out: {str(error.__context__ or error)[:160]}")
    return found


def warmed_up(call: Callable[[], None]) -> Callable[[], None]:
    for _ in range(WARM_UP):
        call()
    return call


def in_graph(call: Callable[[], None]) -> Callable[[], None]:
    """Captures a warmed-up call in a CUDA graph and returns the replay, which does not need the host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    return graph.replay


def in_a_row(call: Callable[[], None]) -> Callable[[], None]:
    """Returns a call of several steps; the host enqueues the next step while the GPU is busy."""

    def steps() -> None:
        for _ in range(STEPS_IN_A_ROW):
            call()

    return steps


def target_of(name: str, rows: int, hidden: int) -> float | None:
    """Returns the largest allowed ratio of a contender's time to its baseline, or None if it has no target.

    The baseline is the three GEMMs; for ignored rows, it is the operator without ignored rows.
    """
    if name == MEAN + IN_GRAPH and rows <= 1024:
        return 1.00
    return {
        "operator": 1.38 if hidden >= 4096 else 1.42 if hidden >= 2048 else 1.6,
        KEPT: 1.05 if hidden >= 2048 else 1.15,
        PARTIAL: 1.12,
        MEAN: 1.00 if hidden >= 2048 else 1.05,
        IGNORED: 0.45 if rows <= 1024 else 0.36,
    }.get(name.removesuffix(IN_GRAPH).removesuffix(IN_A_ROW))


def measure(args: argparse.Namespace, rows: int, hidden: int, vocab: int) -> list[dict]:
    shape = f"T={rows}, H={hidden}, V={vocab}"
    say(f"{shape}, ms:")
    given = inputs_of(rows, hidden, vocab, args.device)
    ignored = given._replace(target=given.target.clone())
    ignored.target[: int(rows * IGNORED_SHARE)] = -100
    left = given._replace(hidden=given.hidden.detach()[int(rows * IGNORED_SHARE) :])
    contenders = {
        GEMMS: functools.partial(three_gemms, given),
        GEMMS_LEFT: functools.partial(three_gemms, left),
        "operator": functools.partial(trained, ours, given),
        IGNORED: functools.partial(trained, ours, ignored),
        MEAN: functools.partial(trained, mean_loss, given),
    }
    if fits_kept(rows, vocab):
        contenders[KEPT] = functools.partial(trained, kept, given)
    else:
        contenders[PARTIAL] = functools.partial(trained, partly_kept, given)
    if not args.no_torch and rows * vocab <= TORCH_LOGITS_MAX:
        contenders["torch"] = functools.partial(trained, in_memory, given)
    if not args.no_torch:
        torch.compiler.reset()  # so that earlier shapes do not count as recompilations
        compiled = torch.compile(in_memory, dynamic=False)
        contenders["torch.compile"] = functools.partial(trained, compiled, given)
    for name, scores in ({} if args.no_peers else importable()).items():
        if rows <= SLOW_PEER_ROWS_MAX or name in FAST_PEERS:
            contenders[name] = functools.partial(trained, scores, given)
    ready = able(contenders, warmed_up)
    if rows <= FEW_ROWS_MAX:
        few = {
            name: ready[name] for name in (GEMMS, "operator", KEPT, MEAN, IGNORED) if name in ready
        }
        ready |= able({name + IN_A_ROW: call for name, call in few.items()}, in_a_row)
        if args.device == "cuda":
            captured = [name for name in few if name not in (GEMMS, IGNORED)]
            ready |= able({name + IN_GRAPH: few[name] for name in captured}, in_graph)
    milliseconds = timed_rounds(ready, args.device, args.rounds)
    records = []
    for name, figures in milliseconds.items():
        if name in (GEMMS, GEMMS + IN_A_ROW):
            continue
        limit = None if args.quick else target_of(name, rows, hidden)
        baseline = "operator" if name.startswith(IGNORED) else GEMMS
        baseline += IN_A_ROW if name.endswith(IN_A_ROW) else ""
        records.append(
            bench_records.record_of_rounds(
                f"Forward and backward, {name}, {shape}",
                "ms",
                figures,
                baseline=(baseline, milliseconds[baseline]),
                note="" if limit is None else f"target at most {limit}",
            )
        )
    if args.device == "cuda":
        bound = EXTRA_MIB + 4 * rows * hidden / 2**20
        for name in ("operator", KEPT, PARTIAL, MEAN):
            if name not in milliseconds:
                continue
            records.append(
                bench_records.record(
                    f"Forward and backward, {name}, {shape}: memory beyond the gradients",
                    extra_mib(contenders[name], given),
                    "MiB",
                    note=f"target at most {bound:.0f}" if name == "operator" else "",
                )
            )
    return records


def relative_error(gradient: Tensor, true: Tensor) -> float:
    """Returns the error relative to the Frobenius norm of `true`, which is in double."""
    # The comparison runs in pieces, so that it holds no further copies of [V, H] in double.
    pieces = zip(gradient.split(4096), true.split(4096), strict=True)
    square = sum(((a.double() - b) ** 2).sum().item() for a, b in pieces)
    return square**0.5 / true.norm().item()


def gradient_errors(args: argparse.Namespace, hidden: int, vocab: int) -> list[dict]:
    """Returns the errors of both gradients against double, relative to the Frobenius norm, for the same inputs."""
    given = inputs_of(ERROR_ROWS, hidden, vocab, args.device)
    exact = given._replace(
        hidden=given.hidden.detach().double().requires_grad_(),
        weight=given.weight.detach().double().requires_grad_(),
    )

    def gradients(scores: Callable, of: Inputs) -> tuple[Tensor, ...]:
        outputs = scores(of.hidden, of.weight, of.target)
        upstream = [torch.ones_like(outputs[0])]
        if outputs[0].dim() > 0:
            upstream = [g.to(o.dtype) for g, o in zip(of[3:], outputs, strict=True)]
        return torch.autograd.grad(outputs, (of.hidden, of.weight), upstream)

    records = []
    for in_double_is, contenders in (
        (in_double, (("operator", ours), (KEPT, kept), ("torch", in_memory))),
        (mean_loss_in_double, ((MEAN, mean_loss), ("torch, mean loss", mean_loss_in_memory))),
    ):
        truth = gradients(in_double_is, exact)
        for name, scores in contenders:
            for what, ours_is, true in zip(
                ("hidden", "weight"), gradients(scores, given), truth, strict=True
            ):
                records.append(
                    bench_records.record(
                        f"Gradient of {what}, {name}, T={ERROR_ROWS}, H={hidden}, V={vocab}",
                        relative_error(ours_is, true),
                        "of the norm",
                        note="against double"
                        + ("" if name.startswith("torch") else f"; target at most {ERROR_MAX}"),
                    )
                )
        del truth
    return records


def parser_of(
    description: str, *, heads: str, rounds: int, rows: str = "1024,4096,16384"
) -> argparse.ArgumentParser:
    """Returns a parser with the options that all benchmarks of the operator share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="JSON file to write; default: standard output"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--heads",
        default=heads,
        help="hidden size x vocabulary, HxV,...; HxV:T measures T rows of this head instead of those of --rows; "
        f"default: {heads}",
    )
    parser.add_argument(
        "--rows", default=rows, help=f"numbers of tokens in a step, T,...; default: {rows}"
    )
    parser.add_argument(
        "--draw",
        type=int,
        metavar="COUNT",
        help="measure COUNT heads and numbers of rows that --seed draws, instead of --heads and --rows; "
        "targets are those of the default sizes",
    )
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"default: {rounds}")
    parser.add_argument(
        "--quick", action="store_true", help="use a small head and check no performance targets"
    )
    parser.add_argument(
        "--commit", help="commit of the records; default: HEAD of git, with -dirty if files differ"
    )
    return parser


def drawn_heads(count: int, seed: int) -> str:
    """Returns heads as --heads has them: 512 to 8,192 deep in steps of 64, with 32,000 to 262,144 ids, and
    one number of rows each, 1 to 20,000. Rows and ids are drawn by their logarithms, since small ones
    matter as much as large ones.
    """
    draw = random.Random(seed)
    return ",".join(
        f"{64 * draw.randint(8, 128)}"
        f"x{round(32_000 * (262_144 / 32_000) ** draw.random())}"
        f":{round(20_000 ** draw.random())}"
        for _ in range(count)
    )


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.draw is not None:
        if args.draw < 1:
            parser.error(f"--draw is {args.draw}, must be at least 1")
        args.heads = drawn_heads(args.draw, args.seed)
        say(f"seed {args.seed}: {args.heads}")
    if args.quick:
        args.heads, args.rows, args.rounds = "64x2048", "128", 2
    return args


def heads_and_rows(args: argparse.Namespace) -> Iterator[tuple[int, int, list[int]]]:
    """Yields hidden size, vocabulary and rows. Sets machine and commit of the records first."""
    bench_records.ORIGIN.update(
        machine=bench_records.machine(with_gpu=args.device == "cuda"),
        commit=args.commit or bench_records.commit(),
    )
    for head in args.heads.split(","):
        sizes, _, own_rows = head.partition(":")
        hidden, vocab = (int(size) for size in sizes.split("x"))
        yield hidden, vocab, [int(rows) for rows in (own_rows or args.rows).split(",")]


def measure_sizes(
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace, int, int, int], list[dict]],
    of_head: Callable[[argparse.Namespace, int, int], list[dict]] = lambda *_: [],
) -> int:
    """Measures each number of rows of each head, and `of_head` after each head. Returns the exit status."""
    records: list[dict] = []
    for hidden, vocab, all_rows in heads_and_rows(args):
        for rows in all_rows:
            records += measure(args, rows, hidden, vocab)
            if args.out:
                bench_records.write(records, args.out)
        records += of_head(args, hidden, vocab)
    has_misses = bench_records.report_misses(records)
    bench_records.write(records, args.out)
    return 1 if has_misses else 0


def measure_one_size(
    description: str,
    measure: Callable[[argparse.Namespace, int, int, int], list[dict]],
    *,
    rounds: int,
) -> int:
    """Runs a benchmark of 4,096 rows, a hidden size of 4,096 and 151,936 ids by default. Returns its exit status."""
    args = parsed(parser_of(description, heads="4096x151936", rounds=rounds, rows="4096"))
    return measure_sizes(args, measure)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__ or "", heads="4096x151936,2048x151936,1024x151936", rounds=9)
    parser.add_argument("--no-torch", action="store_true", help="leave out torch and torch.compile")
    parser.add_argument("--no-peers", action="store_true", help="leave out other packages")
    args = parsed(parser)
    args.no_torch = args.no_torch or args.quick
    return args


def main() -> int:
    return measure_sizes(arguments(), measure, gradient_errors)


if __name__ == "__main__":
    sys.exit(main())
