#!/usr/bin/env python3
"""Measures the speed of the CPU engine or of the operator, compared with baselines, or the engine's accuracy.

    cpu_bench.py --bin-dir build/release/bin speed --rows 256 4096 --out results/cpu_speed.json
    cpu_bench.py --bin-dir build/release/bin accuracy --out results/cpu_accuracy.json
    cpu_bench.py --bin-dir build/release/bin operator --rows 256 4096 --out results/cpu_operator.json

Exits with 1 if a figure misses its target.

Needs the programs of -DLOGPROBD_BENCHMARKS=ON and, for speed, torch. One round runs every contender once, in
turn; figures are medians over the rounds. `ours` computes logprob and entropy of every row. The GEMMs (oneDNN,
torch) only write logits. The torch chains compute log_softmax, the logprob of the target and the entropy from
materialised logits in bf16 or fp32. `operator` compares the forward of kernels/torch_ops, which packs the
weight while it uses it, with such a chain.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from bench_records import ORIGIN, ROOT, commit, machine, record, report_misses, write

ACCURACY_LIMITS = {"logprob_max": 1e-4, "logprob_p99": 2e-5, "entropy_max": 2e-4}
FP32_LOGPROB_MAX = 5e-6
# Largest allowed ratios of our time to that of a baseline.
SPEED_LIMITS = {"gemm": 1.3, "torch_bf16": 1 / 1.4, "torch_f32": 1 / 2}


class Bench:
    """A process of cpu_kernel_bench, which runs the contender named in a command and answers with its time."""

    def __init__(self, binary: pathlib.Path, rows: int, hidden: int, vocab: int) -> None:
        self.process = subprocess.Popen(
            [binary, str(rows), str(hidden), str(vocab)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, command: str) -> dict:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"cpu_kernel_bench ended while running {command}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        if self.process.wait() != 0:
            raise SystemExit(f"cpu_kernel_bench ended with {self.process.returncode}")


def torch_contenders(rows: int, hidden: int, vocab: int) -> dict[str, Callable[[], None]]:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(1)
    x = torch.randn(rows, hidden, dtype=torch.bfloat16)
    weight = torch.empty(vocab, hidden, dtype=torch.bfloat16).normal_(0, 3.0 / hidden**0.5)
    targets = torch.randint(0, vocab, (rows, 1))

    def gemm() -> None:
        torch.mm(x, weight.t())

    def chain(dtype: torch.dtype) -> None:
        logits = torch.mm(x, weight.t()).to(dtype)
        logprobs = torch.log_softmax(logits, dim=-1)
        del logits
        logprobs.gather(1, targets)
        -(logprobs.exp() * logprobs).sum(dim=-1)

    return {
        "torch_gemm": gemm,
        "torch_bf16": lambda: chain(torch.bfloat16),
        "torch_f32": lambda: chain(torch.float32),
    }


NAMES = {
    "onednn_bf16": "oneDNN bf16 GEMM, bf16 logits",
    "onednn_f32_out": "oneDNN bf16 GEMM, fp32 logits",
    "onednn_f32": "oneDNN fp32 GEMM, fp32 logits",
    "torch_gemm": "torch bf16 GEMM",
    "torch_bf16": "torch log_softmax and entropy over bf16 logits",
    "torch_f32": "torch log_softmax and entropy over fp32 logits",
}


def measure_speed(binary: pathlib.Path, rows: int, args: argparse.Namespace) -> list[dict]:
    bench = Bench(binary, rows, args.hidden, args.vocab)
    torch_runs = torch_contenders(rows, args.hidden, args.vocab)
    onednn = ["onednn_bf16"] + ([] if args.only_bf16 else ["onednn_f32_out", "onednn_f32"])
    seconds: dict[str, list[float]] = {name: [] for name in ["ours", *onednn, *torch_runs]}
    info = bench.run("memory")
    deadline = time.monotonic() + args.seconds_max
    rounds = 0
    # Round 0 is a warm-up and does not count.
    while rounds <= args.rounds and (rounds < 2 or time.monotonic() < deadline):
        for name, figures in seconds.items():
            if name in torch_runs:
                begin = time.perf_counter()
                torch_runs[name]()
                taken = time.perf_counter() - begin
            else:
                taken = bench.run(name)["seconds"]
            if rounds > 0:
                figures.append(taken)
            time.sleep(0.05)  # lets the threads of this contender stop spinning
        rounds += 1
    bench.close()

    shape = f"T={rows}, H={args.hidden}, V={args.vocab}, bf16"
    ours = statistics.median(seconds["ours"])
    common = {
        "rounds": rounds - 1,
        "note": f"{info['isa']}, {info['threads']} threads, logprob and entropy",
        "spread": [min(seconds["ours"]), max(seconds["ours"])],
    }

    def against(name: str, remark: str, limit: float | None = None) -> dict:
        if limit is not None:
            remark = f"{remark}, target at most {limit:.2g}".removeprefix(", ")
        figure = statistics.median(seconds[name])
        low_high = f"{min(seconds[name]):.4g} to {max(seconds[name]):.4g}"
        return record(
            f"CPU, {shape}",
            ours,
            "s",
            **{
                **common,
                "baseline": {"what": NAMES[name], "figure": figure},
                "ratio": ours / figure,
                "note": f"{common['note']}; {remark}; baseline spread {low_high} s",
            },
        )

    gemms = [name for name in ("onednn_bf16", "onednn_f32_out", "torch_gemm") if name in seconds]
    best = min(gemms, key=lambda name: statistics.median(seconds[name]))
    chains = ("torch_bf16", "torch_f32")
    records = [against(best, "best bf16 GEMM", SPEED_LIMITS["gemm"])]
    records += [
        against(name, "a further GEMM") for name in seconds if name not in ("ours", best, *chains)
    ]
    records.append(against("torch_bf16", "", SPEED_LIMITS["torch_bf16"]))
    records.append(against("torch_f32", "", SPEED_LIMITS["torch_f32"]))
    records.append(
        record(
            f"CPU, {shape}: memory beyond weight, hidden and results",
            info["extra_bytes"] / 2**20,
            "MiB",
            note="growth of the process's peak while the workspace is made and a batch is scored; target at most 64",
        )
    )
    return records


def speed(args: argparse.Namespace) -> list[dict]:
    records = []
    for rows in args.rows:
        records += measure_speed(args.bin_dir / "cpu_kernel_bench", rows, args)
        print(f"T={rows} done", file=sys.stderr)
        if args.out:
            write(records, args.out)  # a long run that ends early keeps its figures
    return records


def accuracy(args: argparse.Namespace) -> list[dict]:
    command = [
        args.bin_dir / "cpu_accuracy",
        str(args.case_rows),
        str(args.hidden),
        str(args.vocab),
        args.isa,
    ]
    lines = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()
    names = {
        "logprob_max": "logprob, largest",
        "logprob_p99": "logprob, 99th percentile",
        "entropy_max": "entropy, largest",
    }
    records = []
    for case in map(json.loads, lines):
        for key, name in names.items():
            limit = ACCURACY_LIMITS[key]
            if case["case"].startswith("fp32") and key == "logprob_max":
                limit = FP32_LOGPROB_MAX
            records.append(
                record(
                    f"CPU error against double, {case['case']}: {name}",
                    case[key],
                    "nats",
                    note=f"{case['engine']}, H={args.hidden}, V={args.vocab}, {case['rows']} rows, "
                    f"{case['samples']} logprobs, {case['out_of_range']} out of range; target at most {limit:g}",
                )
            )
            if case["out_of_range"]:
                records[-1]["missed"] = True
    return records


def operator_contenders(
    rows: int, hidden: int, vocab: int, dtype: str
) -> dict[str, Callable[[], object]]:
    import torch
    from logprobd_ops import linear_logprob

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    x = torch.randn(rows, hidden).to(getattr(torch, dtype))
    weight = torch.empty(vocab, hidden, dtype=x.dtype).normal_(0, 3.0 / hidden**0.5)
    targets = torch.randint(0, vocab, (rows,))

    def materialised() -> None:
        logprobs = torch.log_softmax(torch.nn.functional.linear(x, weight).float(), dim=-1)
        logprobs.gather(1, targets.unsqueeze(1))
        -(logprobs.exp() * logprobs).sum(dim=-1)

    return {"ours": lambda: linear_logprob(x, weight, targets), "torch": materialised}


def status_bytes(name: str) -> int:
    """Returns a size from this process's status, such as VmHWM."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}")


def peak_growth(run: Callable[[], object]) -> int:
    """Returns by how many bytes the process's peak grows while `run` is called."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_bytes("VmRSS")
    run()
    return status_bytes("VmHWM") - before


def measure_operator(rows: int, dtype: str, args: argparse.Namespace) -> list[dict]:
    contenders = operator_contenders(rows, args.hidden, args.vocab, dtype)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    contenders["ours"]()  # starts the threads
    extra = peak_growth(contenders["ours"])
    contenders["torch"]()
    for _ in range(args.rounds):
        for name, run in contenders.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
            time.sleep(0.05)  # lets the threads stop spinning
    shape = f"T={rows}, H={args.hidden}, V={args.vocab}, {dtype}"
    ours, figure = (statistics.median(seconds[name]) for name in ("ours", "torch"))
    return [
        record(
            f"CPU operator, {shape}",
            ours,
            "s",
            rounds=args.rounds,
            spread=[min(seconds["ours"]), max(seconds["ours"])],
            baseline={"what": "torch linear, log_softmax and entropy in fp32", "figure": figure},
            ratio=ours / figure,
            note="logprob and entropy, packing included; baseline spread "
            f"{min(seconds['torch']):.4g} to {max(seconds['torch']):.4g} s; target at most 1",
        ),
        record(
            f"CPU operator, {shape}: memory beyond inputs and results",
            extra / 2**20,
            "MiB",
            note="growth of the process's peak during a call; target at most 64",
        ),
    ]


def operator(args: argparse.Namespace) -> list[dict]:
    library = args.bin_dir.parent / "lib" / "liblogprobd_torch_ops.so"
    os.environ.setdefault("LINEAR_LOGPROB_LIBRARY", str(library))
    sys.path.insert(0, str(ROOT / "kernels" / "torch_ops" / "python"))
    return [
        result
        for rows in args.rows
        for dtype in ("bfloat16", "float32")
        for result in measure_operator(rows, dtype, args)
    ]


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bin-dir", type=pathlib.Path, default=ROOT / "build" / "release" / "bin")
    kinds = parser.add_subparsers(required=True)
    for name, function in (("speed", speed), ("accuracy", accuracy), ("operator", operator)):
        kind = kinds.add_parser(name)
        kind.set_defaults(function=function)
        kind.add_argument("--hidden", type=int, default=1024, help="hidden size; default: 1024")
        kind.add_argument("--vocab", type=int, default=151_936, help="default: 151936")
        kind.add_argument(
            "--out", type=pathlib.Path, help="JSON file to write; default: standard output"
        )
        kind.add_argument(
            "--machine",
            help="machine of the records; default: processor and cores from /proc/cpuinfo",
        )
        kind.add_argument(
            "--commit",
            help="commit of the records; default: HEAD of git, with -dirty if files differ",
        )
        if name != "accuracy":
            kind.add_argument("--rows", type=int, nargs="+", default=[256, 4096])
            kind.add_argument("--rounds", type=positive, default=7)
        if name == "speed":
            kind.add_argument(
                "--seconds-max",
                type=float,
                default=600,
                help="start no round after this time, for each number of rows; default: 600",
            )
            kind.add_argument(
                "--only-bf16",
                action="store_true",
                help="leave out the GEMMs of oneDNN with fp32 output",
            )
        if name == "accuracy":
            kind.add_argument("--case-rows", type=int, default=64)
            kind.add_argument(
                "--isa",
                default="",
                help="instruction set of the engine; default: the best of this CPU",
            )
    args = parser.parse_args()
    ORIGIN.update(machine=args.machine or machine(), commit=args.commit or commit())
    records = args.function(args)
    has_misses = report_misses(records)
    write(records, args.out)
    return 1 if has_misses else 0


if __name__ == "__main__":
    sys.exit(main())
