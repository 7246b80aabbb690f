"""Trains a tiny model by GRPO with TRL's own reference and with a served one.

    python client/adapters/examples/grpo_reference/grpo_reference.py [--steps 40]

Writes a model with random weights, whose reward is the share of vowels that it writes. The second
training scores its reference by a server on the CPU and has removed the reference's head, and its
policy is scored by the operator. Prints a table.
"""

import argparse
import logging
import string
import tempfile
from pathlib import Path
from typing import Any

import logprobd
import torch
from datasets import Dataset
from logprobd_adapters import RemoteScorer, Scorer
from logprobd_adapters.trl import use_scorer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

SPECIAL = ["<unk>", "<s>", "</s>"]
VOWELS = frozenset("aeiou")
HIDDEN_SIZE = 64


def write_model(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes a small Llama with random weights and a tokenizer of letters."""
    torch.manual_seed(0)
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *string.ascii_lowercase])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"},
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)


def share_of_vowels(completions: list[str], **_: Any) -> list[float]:
    letters = [text.split() for text in completions]
    return [sum(letter in VOWELS for letter in each) / max(len(each), 1) for each in letters]


def train(folder: Path, steps: int, scorer: Scorer | None = None) -> list[dict[str, float]]:
    """Trains the model of a folder and returns the reward and the KL divergence of each step.

    Args:
        folder: the model, which is also the reference.
        steps: optimizer steps.
        scorer: scorer of the reference, whose own head is then removed. The policy's own is scored
            by the operator then, in this and later trainings. None: TRL's own function.
    """
    prompts = [f"{first}{second}" for first in "bcdf" for second in string.ascii_lowercase]
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=str(folder),
            reward_funcs=share_of_vowels,
            args=GRPOConfig(
                output_dir=output,
                beta=0.05,
                learning_rate=3e-3,
                max_steps=steps,
                num_generations=8,
                per_device_train_batch_size=32,
                max_completion_length=12,
                logging_steps=1,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
        )
        if scorer is not None:
            from logprobd_ops.compat.trl import apply_logprobd_kernel  # noqa: PLC0415  (a library)

            apply_logprobd_kernel()
            use_scorer(trainer, scorer)
            trainer.ref_model.set_output_embeddings(torch.nn.Identity())
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "kl" in entry]
    return [{name: entry[name] for name in ("reward", "kl")} for entry in logs]


def table(trl: list[dict[str, float]], served: list[dict[str, float]]) -> str:
    lines = [
        "| step | reward, TRL | reward, logprobd | KL, TRL, nats | KL, logprobd, nats |",
        "|---|---|---|---|---|",
    ]
    for step, (stock, ours) in enumerate(zip(trl, served, strict=True), start=1):
        cells = [f"{run[name]:.6f}" for name in ("reward", "kl") for run in (stock, ours)]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    reward, kl = (
        max(abs(stock[name] - ours[name]) for stock, ours in zip(trl, served, strict=True))
        for name in ("reward", "kl")
    )
    return "\n".join([*lines, "", f"largest difference: reward {reward:.1e}, KL {kl:.1e} nats"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each training")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        stock = train(folder, arguments.steps)
        with logprobd.serve(folder, device="cpu") as client:
            served = train(folder, arguments.steps, RemoteScorer(client))
    print(table(stock, served))


if __name__ == "__main__":
    main()
