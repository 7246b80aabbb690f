"""Inputs of the tests that need a GPU."""

import torch
from linear_logprob_reference import seeded
from torch import Tensor

IGNORED = -100


def make_case(
    rows=300, size=64, vocab=2000, device="cuda", seed=0
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.device(device):
        random = seeded(seed)
        hidden = torch.randn(rows, size, generator=random).bfloat16().requires_grad_()
        weight = (torch.randn(vocab, size, generator=random) / size**0.5 * 3).bfloat16()
        target = torch.randint(vocab, (rows,), generator=random)
        target[::7] = IGNORED
    return hidden, weight.requires_grad_(), target
