"""The reference for linear_logprob, with logits materialised in fp64 and gradients by autograd."""

from typing import NamedTuple

import torch
from torch import Tensor


def seeded(seed: int) -> torch.Generator:
    """Returns a generator on the default device, where tests create their tensors."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


class Scores(NamedTuple):
    """Scores shaped like the targets, in fp64, with argmax in int64. They are zero for ignored rows."""

    logprob: Tensor
    entropy: Tensor
    lse: Tensor
    argmax: Tensor
    mean_logit: Tensor
    max_logit: Tensor  # before temperature, as min_logit
    min_logit: Tensor
    sum_p_squared: Tensor
    target_rank: Tensor


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
    """Returns x = cap(scale * (h . w) + bias) / temperature, [..., vocab_valid]."""
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
    """Returns the expected, differentiable results of linear_logprob for a whole head.

    Ignored rows are removed before anything is computed, so that no value in them, not even a NaN, affects a
    result or a gradient. For ids outside the vocabulary, gather raises an error.
    """
    is_valid = target != ignore_index
    if isinstance(temperature, Tensor):
        temperature = temperature.expand(target.shape)[is_valid]
    shaping = {"scale": scale, "softcap": softcap, "vocab_valid": vocab_valid}
    x = reference_logits(hidden[is_valid], weight, bias, temperature=temperature, **shaping)
    z = reference_logits(hidden[is_valid], weight, bias, **shaping)
    num_columns = x.shape[-1]
    if mean_logit_weights is None:
        mean_logit_weights = torch.full((num_columns,), 1.0 / num_columns, dtype=torch.float64)
    columns = torch.arange(num_columns, device=x.device)

    lse = torch.logsumexp(x, -1)
    logprobs = x - lse.unsqueeze(-1)
    logprob = logprobs.gather(-1, target[is_valid].long().unsqueeze(-1)).squeeze(-1)
    probabilities = logprobs.exp()
    # Skips columns of -inf, since 0 * -inf is NaN.
    entropy = -(probabilities * logprobs.masked_fill(probabilities == 0, 0.0)).sum(-1)
    is_max = x == x.amax(-1, keepdim=True)
    argmax = torch.where(is_max, columns, num_columns).amin(-1)
    mean_logit = x @ mean_logit_weights[:num_columns].to(x)

    def at_counted_rows(values: Tensor) -> Tensor:
        return values.new_zeros(is_valid.shape).masked_scatter(is_valid, values)

    extremes = (z.amax(-1), z.amin(-1))
    sum_p_squared = probabilities.square().sum(-1)
    target = target[is_valid].long().unsqueeze(-1)
    of_target = z.gather(-1, target)
    target_rank = ((z > of_target) | ((z == of_target) & (columns < target))).sum(-1)
    scores = (logprob, entropy, lse, argmax, mean_logit, *extremes, sum_p_squared, target_rank)
    return Scores(*map(at_counted_rows, scores))


def requested(scores) -> list[Tensor]:
    """Returns the fields of the operator's result that were requested."""
    return [score for score in scores if score is not None]
