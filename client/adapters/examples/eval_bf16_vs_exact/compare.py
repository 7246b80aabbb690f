"""Compares lm-eval's own scores of a bf16 model, and ours, with scores in double precision.

    python client/adapters/examples/eval_bf16_vs_exact/compare.py

Writes a small model with random weights, serves its head on the CPU, evaluates two tasks and prints
a table. All evaluations run the same body in the same batches, so only the head differs.
"""

import contextlib
import dataclasses
import io
import logging
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
import logprobd
import tiny_model
import torch
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager, get_task_dict
from logprobd_adapters import Scorer
from logprobd_adapters.lm_eval import LogprobdLM, LogprobdLocalLM
from transformers import AutoModelForCausalLM

TASKS = ["logprobd_questions", "logprobd_passages"]


def exact_model(folder: Path, **options: Any) -> HFLM:
    """Returns lm-eval's own model with logits and softmax in double precision."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.set_output_embeddings(tiny_model.DoubleHead(model.get_output_embeddings()))
    return HFLM(model, tokenizer=str(folder), **options)


@dataclasses.dataclass
class Outcome:
    """The log-likelihoods of one evaluation, in nats, and the rows whose logits it computed."""

    continuations: list[float]
    passages: list[float]
    rows: int

    def errors(self, exact: "Outcome") -> tuple[float, float]:
        """Returns the largest difference of a continuation and of a passage, in nats."""
        continuations = zip(self.continuations, exact.continuations, strict=True)
        passages = zip(self.passages, exact.passages, strict=True)
        return max(abs(a - b) for a, b in continuations), max(abs(a - b) for a, b in passages)


def count_rows(model: LM) -> list[int]:
    """Returns a list that will have the number of rows of each call of the head or the scorer."""
    counts: list[int] = []
    scorer: Scorer | None = getattr(model, "scorer", None)
    if scorer is None:
        head = model.model.get_output_embeddings()
        head.register_forward_pre_hook(lambda _, inputs: counts.append(inputs[0][..., 0].numel()))
    else:
        score = scorer.score

        def counted(hidden: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            counts.append(hidden[..., 0].numel())
            return score(hidden, *arguments, **keywords)

        scorer.score = counted
    return counts


def evaluate(model: LM) -> Outcome:
    counts = count_rows(model)
    tasks = TaskManager(include_path=str(tiny_model.HERE), include_defaults=False)
    # simple_evaluate would also ask git for the commit of the working directory.
    results = lm_eval.evaluate(model, get_task_dict(TASKS, tasks), bootstrap_iters=0)
    questions, passages = (results["samples"][task] for task in TASKS)
    return Outcome(
        [continuation[0][0] for sample in questions for continuation in sample["resps"]],
        [float(sample["resps"][0][0]) for sample in passages],
        sum(counts),
    )


def compare(folder: Path) -> tuple[Outcome, dict[str, Outcome]]:
    """Returns the outcome in double precision and those of the other methods."""
    model = str(folder)
    options = {"device": "cpu", "batch_size": 4}
    exact = evaluate(exact_model(folder, batch_size=4))
    stock = {
        "lm-eval": evaluate(HFLM(model, **options)),
        "lm-eval, softmax_dtype=float32": evaluate(HFLM(model, softmax_dtype="float32", **options)),
    }
    with logprobd.serve(folder, device="cpu") as client:
        served = evaluate(LogprobdLM(model, address=client.address, **options))
    local = evaluate(LogprobdLocalLM(model, **options))
    return exact, stock | {"logprobd": served, "logprobd-local": local}


def table(exact: Outcome, outcomes: dict[str, Outcome]) -> str:
    lines = [
        "| model | largest error of a continuation, nats | of a passage, nats | rows scored |",
        "|---|---|---|---|",
    ]
    for name, outcome in outcomes.items():
        continuation, passage = outcome.errors(exact)
        lines.append(f"| {name} | {continuation:.2g} | {passage:.2g} | {outcome.rows} |")
    return "\n".join(lines)


def main() -> None:
    logging.disable(logging.WARNING)
    progress_bars = contextlib.redirect_stderr(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, progress_bars:
        tiny_model.write_model(Path(folder))
        outcomes = compare(Path(folder))
    print(table(*outcomes))


if __name__ == "__main__":
    main()
