"""Writes a small Llama with random weights and a tokenizer of whole words.

    python tiny_model.py DIR

The head's logits have the spread of a trained model's, so they show what rounding costs. Nothing is
downloaded.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
VOCAB_SIZE = 8_192
HIDDEN_SIZE = 64
LENGTH_MAX = 64
LOGIT_STDDEV = 3.0
SPECIAL = ["<unk>", "<s>", "</s>"]


def words(vocab_size: int = VOCAB_SIZE) -> list[str]:
    """Returns vocab_size words: special ones, those of the tasks' data and prompts, and others."""
    split = pre_tokenizers.Whitespace()
    texts = ["Question: Answer:"]
    for line in (HERE / "questions" / "test.jsonl").read_text().splitlines():
        question = json.loads(line)
        texts += [question["question"], *question["choices"]]
    for line in (HERE / "passages" / "test.jsonl").read_text().splitlines():
        texts.append(json.loads(line)["text"])
    found = (word for text in texts for word, _ in split.pre_tokenize_str(text))
    known = list(dict.fromkeys([*SPECIAL, *found]))
    return known + [f"word{number}" for number in range(len(known), vocab_size)]


def write_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> None:
    vocabulary = {word: number for number, word in enumerate(words(vocab_size))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"},
    ).save_pretrained(folder)


def write_model(
    folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **config: Any
) -> None:
    """Writes model and tokenizer. The same seed gives the same weights in each dtype, rounded.

    Args:
        config: fields of LlamaConfig that differ from the small model's.
    """
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": LENGTH_MAX,
    } | config
    model = LlamaForCausalLM(
        LlamaConfig(
            **sizes,
            tie_word_embeddings=False,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=LOGIT_STDDEV / sizes["hidden_size"] ** 0.5)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, sizes["vocab_size"])


class DoubleHead(torch.nn.Module):
    """A head that computes its logits in double precision."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.double() @ self.weight.double().T


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
