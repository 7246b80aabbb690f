"""Heads of 20 model classes with the logits that transformers computes of them, for tests without transformers.

`tests/adapters/test_transformers_heads.py` writes and checks head_cases.json.
"""

import json
import pathlib
import zlib
from typing import Any

import torch

FILE = pathlib.Path(__file__).with_suffix(".json")
ROWS = 5
ROLES = ("head", "embedding", "bias")


def values(role: str, shape: list[int]) -> torch.Tensor:
    """Returns a tensor of a role: logits of a weight have a standard deviation of 4, and a bias has one of 1."""
    random = torch.Generator().manual_seed(zlib.crc32(role.encode()))
    return torch.randn(shape, generator=random) * (1.0 if role == "bias" else 4 / shape[-1] ** 0.5)


def rows(hidden_size: int) -> torch.Tensor:
    return torch.randn((ROWS, hidden_size), generator=torch.Generator().manual_seed(1))


def load() -> list[dict[str, Any]]:
    """Returns for each class: name, config, hidden_size, tensors (name: role and shape), and logprobs of ids 0 to 4."""
    return json.loads(FILE.read_text())
