"""Calls of the operators in torch.ops.logprobd, with arguments and results by name."""

from collections.abc import Sequence

import torch
from logprobd_ops._operator import linear_logprob_arguments
from torch import Tensor


def raw_scores(hidden, weight, target, bias=None, *, weight_grad=None, **options) -> dict:
    """Returns the results of torch.ops.logprobd.linear_logprob by their names in its schema."""
    operator = torch.ops.logprobd.linear_logprob
    arguments = linear_logprob_arguments(hidden, weight, target, bias, **options)
    names = [result.name for result in operator.default._schema.returns]
    return dict(zip(names, operator(*arguments, weight_grad), strict=True))


def backward_arguments(
    upstream: dict[str, Tensor],
    saved: dict[str, Tensor],
    *inputs: Tensor | None,
    needs: Sequence[bool] = (True, True, True),
    **options,
) -> tuple:
    """Returns the arguments of torch.ops.logprobd.linear_logprob_backward. `upstream` has gradients of scores and
    `saved` has results of raw_scores; a missing value is absent."""
    schema = torch.ops.logprobd.linear_logprob_backward.default._schema
    names = [argument.name for argument in schema.arguments]
    values = {f"d_{name}": gradient for name, gradient in upstream.items()} | saved
    values.setdefault("is_cache_overwritable", False)
    return (
        *(values.get(name) for name in names[: names.index("hidden")]),
        *linear_logprob_arguments(*inputs, **options),
        list(needs),
    )
