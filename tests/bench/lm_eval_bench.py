#!/usr/bin/env python3
"""Measures memory and time of rolling log-likelihoods in lm-eval, with its own model and with logprobd.

    lm_eval_bench.py --device cuda --out lm_eval_gpu.json       hidden size 2048, two vocabularies
    lm_eval_bench.py --device cpu --out lm_eval_cpu.json        hidden size 128
    lm_eval_bench.py --device cpu --heads 64x8192 --length 128  a trial run

A model with one layer and random bf16 weights scores one batch of texts through lm-eval's HFLM, and through the models
of logprobd_adapters with the operator in the same process and with a server on this machine. Each runs in a process of
its own, one after another. The body is the same in all of them and small, so the figures are those of the head.

Memory is the peak of a call beyond what is in use after loading and a short call. On a GPU it is that of PyTorch's
allocator, and for the server the GPU memory that it reserves beyond the weights, from its metrics. On a CPU it is
resident memory; rows that client and server share count in both. Time is the median of three calls after the first, or
that of the first if it takes over a minute. On a CPU it is CPU time, the sum over the cores, of client and server,
which other work on the machine changes little. Errors are those of single tokens after short contexts, compared with
logits and softmax in double precision of the same hidden states. A way that runs out of memory, or would need more than
is free on a CPU, has a record without a figure.

Needs lm_eval and transformers, as in the environment of `.ci/run-adapters lm-eval`, and the operator's library
(LINEAR_LOGPROB_LIBRARY; by default that of the build).
"""

import argparse
import contextlib
import dataclasses
import io
import logging
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

sys.path.extend(
    str(pathlib.Path(__file__).resolve().parents[2] / folder)
    for folder in (
        "tests/support/python",
        "client/python",
        "client/adapters",
        "client/adapters/examples/eval_bf16_vs_exact",
        "kernels/torch_ops/python",
    )
)

import bench_records
import psutil
import tiny_model
import torch
from bench_records import ROOT
from cpu_bench import peak_growth
from e2e.fixture import say
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from logprobd_adapters.lm_eval import LogprobdLM, LogprobdLocalLM
from server_process import ServerProcess

STOCK = "lm-eval"
LOCAL = "logprobd-local"
SERVED = "logprobd"
SERVED_IPC = "logprobd, CUDA IPC"  # the client sends the location of its rows in GPU memory
SERVER_FLAGS: dict[str, tuple[str, ...]] = {SERVED: (), SERVED_IPC: ("--cuda-ipc",)}
HEADS = {"cpu": "128x151936,128x262144", "cuda": "2048x151936,2048x262144"}
BATCH = 8  # texts, each as long as the model's window
ROUNDS = 3
SLOW_S = 60  # a call that takes longer is the only one
SAMPLED_TOKENS = 256
CONTEXT = 8  # tokens before a sampled one
SERVER_READY_S = 300
OUT_OF_MEMORY = "out of memory"
SHORT = 16  # tokens of the texts that are scored before memory is measured
MIB = 1 << 20
GIB = 1 << 30
CPU_SPARE = GIB  # for the body and the libraries


@dataclasses.dataclass
class Case:
    """The model and the texts that all ways score."""

    device: str  # "cpu" or "cuda"
    hidden: int
    vocab: int
    length: int  # tokens of a text
    folder: pathlib.Path

    def __str__(self) -> str:
        return f"H={self.hidden}, V={self.vocab}, {BATCH} x {self.length} tokens"

    def write_model(self) -> None:
        tiny_model.write_model(
            self.folder,
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_hidden_layers=1,
            num_attention_heads=max(1, self.hidden // 128),
            max_position_embeddings=self.length,
        )

    def tokens(self, count: int, length: int) -> list[list[int]]:
        """Returns random tokens other than special ones, the same at each call."""
        generator = torch.Generator().manual_seed(1)
        begin = len(tiny_model.SPECIAL)
        return torch.randint(begin, self.vocab, (count, length), generator=generator).tolist()

    def texts(self, length: int) -> list[Instance]:
        words = tiny_model.words(self.vocab)
        return [
            Instance("loglikelihood_rolling", {}, (" ".join(words[token] for token in text),), 0)
            for text in self.tokens(BATCH, length)
        ]

    def cpu_bytes(self, way: str) -> int:
        """Returns about how much memory a way needs on a CPU."""
        weights = 2 * 2 * self.vocab * self.hidden  # embeddings and head
        logits = 2 * BATCH * self.length * self.vocab
        # lm-eval computes the log-softmax next to the logits.
        return CPU_SPARE + 2 * weights + (2 * logits if way == STOCK else 0)


@dataclasses.dataclass
class Outcome:
    """Time and memory of one way of scoring, beyond what it uses after loading, and its error."""

    seconds: list[float]
    cpu_seconds: list[float]  # of this process and the server
    peak_bytes: int
    server_peak_bytes: int | None
    error: float  # nats


@contextlib.contextmanager
def running_server(case: Case, way: str, binaries: pathlib.Path) -> Iterator[ServerProcess | None]:
    """Yields a server of the head if a way needs one, else None."""
    if way not in SERVER_FLAGS:
        yield None
        return
    # The server ends with this process, even if the kernel kills it.
    prefix = ("setpriv", "--pdeathsig", "KILL")
    flags = ("--model", str(case.folder), *SERVER_FLAGS[way])
    with ServerProcess(
        binaries, *flags, device=case.device, prefix=prefix, ready_seconds=SERVER_READY_S
    ) as server:
        yield server


def load(case: Case, way: str, server: ServerProcess | None) -> HFLM:
    options = {"device": case.device, "batch_size": BATCH}
    if server:
        return LogprobdLM(str(case.folder), address=server.grpc, **options)
    return (LogprobdLocalLM if way == LOCAL else HFLM)(str(case.folder), **options)


def client_peak_bytes(device: str, run: Callable[[], object]) -> int:
    """Returns the peak of this process's memory in `run` beyond what it uses before."""
    if device == "cpu":
        return peak_growth(run)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def largest_error(lm: HFLM, case: Case) -> float:
    """Returns the largest error of a sampled token's log-probability, in nats.

    The head of the model is replaced by one in double precision.
    """
    samples = case.tokens(SAMPLED_TOKENS, CONTEXT + 1)
    requests: list[Any] = [(None, tokens[:-1], tokens[-1:]) for tokens in samples]
    found = lm._loglikelihood_tokens(requests)
    lm.model.set_output_embeddings(tiny_model.DoubleHead(lm.model.get_output_embeddings()))
    # In the same batches the body computes the same bits.
    exact = HFLM(lm.model, tokenizer=lm.tokenizer, batch_size=BATCH)._loglikelihood_tokens(requests)
    return max(abs(mine - true) for (mine, _), (true, _) in zip(found, exact, strict=True))


def measure(case: Case, way: str, binaries: pathlib.Path) -> Outcome | None:
    """Returns what a way needed, or None if it ran out of memory."""
    logging.disable(logging.WARNING)
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    with running_server(case, way, binaries) as server:
        lm = load(case, way, server)
        texts = case.texts(case.length)
        assert all(len(lm.tok_encode(text.args[0])) == case.length for text in texts)

        processes = [psutil.Process()] + ([psutil.Process(server.process.pid)] if server else [])

        def cpu_time() -> float:
            times = [process.cpu_times() for process in processes]
            return sum(each.user + each.system for each in times)

        def call() -> None:
            started, cpu_started = time.perf_counter(), cpu_time()
            lm.loglikelihood_rolling(texts, disable_tqdm=True)
            seconds.append(time.perf_counter() - started)
            cpu_seconds.append(cpu_time() - cpu_started)

        def calls() -> None:
            call()
            if seconds[0] > SLOW_S:
                return
            seconds.clear()  # this call was the warm-up
            cpu_seconds.clear()
            for _ in range(ROUNDS):
                call()

        lm.loglikelihood_rolling(case.texts(SHORT), disable_tqdm=True)
        before = 0
        if server and case.device == "cpu":
            before = server.reset_peak_memory()
        try:
            peak = client_peak_bytes(case.device, calls)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            # PyTorch's allocator for CPUs raises a RuntimeError.
            if "memory" not in str(error):
                raise
            return None
        server_peak = None
        if server:
            server_peak = (
                server.peak_memory_bytes() - before
                if case.device == "cpu"
                else sum(
                    int(server.metric("logprobd_gpu_memory_peak_bytes", kind=kind))
                    for kind in ("workspace", "staging")
                )
            )
        return Outcome(seconds, cpu_seconds, peak, server_peak, largest_error(lm, case))


def send(
    connection: multiprocessing.connection.Connection, case: Case, way: str, binaries: pathlib.Path
) -> None:
    # If the kernel must kill a process, it kills this one.
    pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.redirect_stderr(io.StringIO()):  # lm-eval's progress bars
        outcome = measure(case, way, binaries)
    connection.send(outcome)


def in_own_process(case: Case, way: str, binaries: pathlib.Path) -> Outcome | None:
    """Returns the outcome of a process that measures, None if it ran out of memory."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(sender, case, way, binaries))
    process.start()
    sender.close()
    try:
        outcome: Outcome | None = receiver.recv()
    except EOFError:
        outcome = None
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        raise SystemExit(f"{way} failed with {process.exitcode}; its error is above")
    return outcome


def records_of(case: Case, way: str, outcome: Outcome | None, why: str) -> list[dict]:
    def what(column: str) -> str:
        return f"{case}, {way}: {column}"

    is_cpu = case.device == "cpu"
    time_column = what("CPU time" if is_cpu else "time")
    if outcome is None:
        return [bench_records.record(time_column, None, "s", note=why)]
    seconds = outcome.cpu_seconds if is_cpu else outcome.seconds
    records = [
        bench_records.record_of_rounds(time_column, "s", seconds),
        bench_records.record(what("peak memory"), outcome.peak_bytes / MIB, "MiB"),
    ]
    if outcome.server_peak_bytes is not None:
        server_peak = outcome.server_peak_bytes / MIB
        records.append(bench_records.record(what("peak memory of the server"), server_peak, "MiB"))
    records.append(bench_records.record(what("largest error"), outcome.error, "nats"))
    return records


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="JSON file to write; default: standard output"
    )
    parser.add_argument("--device", choices=tuple(HEADS), default="cuda")
    parser.add_argument(
        "--heads",
        help="hidden size x vocabulary, HxV,...; "
        f"default: {HEADS['cuda']}, and on a CPU {HEADS['cpu']}",
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text; default: 2048")
    parser.add_argument(
        "--bin-dir",
        type=pathlib.Path,
        default=ROOT / "build" / "release" / "bin",
        help="folder of the server; default: that of the build",
    )
    parser.add_argument(
        "--commit", help="commit of the records; default: HEAD of git, with -dirty if files differ"
    )
    options = parser.parse_args()
    # The processes that measure inherit these.
    os.environ["HF_HUB_OFFLINE"] = "1"
    library = ROOT / "build" / "release" / "lib" / "liblogprobd_torch_ops.so"
    os.environ.setdefault("LINEAR_LOGPROB_LIBRARY", str(library))
    bench_records.ORIGIN.update(
        machine=bench_records.machine(with_gpu=options.device == "cuda"),
        commit=options.commit or bench_records.commit(),
    )
    ways = [STOCK, LOCAL, SERVED] + ([SERVED_IPC] if options.device == "cuda" else [])
    records: list[dict] = []
    for head in (options.heads or HEADS[options.device]).split(","):
        hidden, vocab = map(int, head.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            case = Case(options.device, hidden, vocab, options.length, pathlib.Path(folder))
            case.write_model()
            for way in ways:
                outcome, why = None, OUT_OF_MEMORY
                free, needed = psutil.virtual_memory().available, case.cpu_bytes(way)
                if case.device == "cpu" and needed > free:
                    why = f"not run: needs {needed / GIB:.1f} GiB of memory, {free / GIB:.1f} free"
                else:
                    outcome = in_own_process(case, way, options.bin_dir)
                found = records_of(case, way, outcome, why)
                for record in found:
                    figure = "-" if record["figure"] is None else f"{record['figure']:.4g}"
                    say(f"{record['what']}: {figure} {record['unit']} {record['note']}")
                records += found
                if options.out:
                    bench_records.write(records, options.out)
    if not options.out:
        bench_records.write(records, None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
