"""The truth for linear_logprob: logits materialised in double, gradients by autograd."""

from typing import NamedTuple

import torch
from torch import Tensor


def seeded(seed: int) -> torch.Generator:
    """On the device that tests make their tensors on."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


class Scores(NamedTuple):
    """Each of the shape of the targets, in double; argmax in int64. Zero on ignored rows."""

    logprob: Tensor
    entropy: Tensor
    lse: Tensor
    argmax: Tensor
    mean_logit: Tensor


def reference_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    vocab_valid: int | None = None,
) -> Tensor:
    """x = cap(scale * (h . w) + bias) / temperature, [..., vocab_valid]."""
    logits = scale * (hidden.double() @ weight.double().T)
    if bias is not None:
        logits = logits + bias.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, Tensor):
        temperature = temperature.double().unsqueeze(-1)
    return (logits / temperature)[..., :vocab_valid]


def reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_valid: int | None = None,
    mean_logit_weights: Tensor | None = None,
) -> Scores:
    """What linear_logprob should return for a whole head; differentiable.

    Ignored rows are left out before anything is computed, so that nothing in them, not even a NaN, reaches a
    result or a gradient. Ids outside the vocabulary are the caller's mistake: gather refuses them.
    """
    is_counted = target != ignore_index
    if isinstance(temperature, Tensor):
        temperature = temperature.expand(target.shape)[is_counted]
    x = reference_logits(
        hidden[is_counted],
        weight,
        bias,
        temperature=temperature,
        scale=scale,
        softcap=softcap,
        vocab_valid=vocab_valid,
    )
    num_columns = x.shape[-1]
    if mean_logit_weights is None:
        mean_logit_weights = torch.full((num_columns,), 1.0 / num_columns, dtype=torch.float64)
    columns = torch.arange(num_columns, device=x.device)

    lse = torch.logsumexp(x, -1)
    logprobs = x - lse.unsqueeze(-1)
    logprob = logprobs.gather(-1, target[is_counted].long().unsqueeze(-1)).squeeze(-1)
    probabilities = logprobs.exp()
    # A column of -inf adds nothing; 0 * -inf would.
    entropy = -(probabilities * logprobs.masked_fill(probabilities == 0, 0.0)).sum(-1)
    is_max = x == x.amax(-1, keepdim=True)
    argmax = torch.where(is_max, columns, num_columns).amin(-1)
    mean_logit = x @ mean_logit_weights[:num_columns].to(x)

    def at_counted_rows(values: Tensor) -> Tensor:
        return values.new_zeros(target.shape).masked_scatter(is_counted, values)

    return Scores(*map(at_counted_rows, (logprob, entropy, lse, argmax, mean_logit)))
