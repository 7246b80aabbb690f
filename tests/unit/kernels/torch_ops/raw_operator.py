"""Calls of the operators in torch.ops.logprobd, with arguments and results by name."""

from collections.abc import Sequence

import torch
from logprobd_ops._memory import ALL_ROWS, NOT_CACHED, LogitCache
from logprobd_ops._operator import linear_logprob_arguments, split_parallel
from torch import Tensor


def raw_arguments(*inputs, keep_logits=NOT_CACHED, cached_rows=ALL_ROWS, **options) -> dict:
    """Returns the arguments that the operators have in common. `options` are those of linear_logprob."""
    parallel, others = split_parallel(options)
    arguments = linear_logprob_arguments(*inputs, parallel=parallel, **others)
    return {**arguments, **LogitCache(keep_logits, cached_rows).arguments()}


def raw_scores(hidden, weight, target, bias=None, *, weight_grad=None, **options) -> dict:
    """Returns the results of torch.ops.logprobd.linear_logprob by their names in its schema."""
    operator = torch.ops.logprobd.linear_logprob
    arguments = raw_arguments(hidden, weight, target, bias, **options)
    names = [result.name for result in operator.default._schema.returns]
    return dict(zip(names, operator(**arguments, weight_grad=weight_grad), strict=True))


def backward_arguments(
    upstream: dict[str, Tensor],
    saved: dict[str, Tensor],
    *inputs: Tensor | None,
    needs: Sequence[bool] = (True, True, True),
    **options,
) -> dict:
    """Returns the arguments of torch.ops.logprobd.linear_logprob_backward. `upstream` has gradients of scores and
    `saved` has results of raw_scores; a missing value is absent."""
    schema = torch.ops.logprobd.linear_logprob_backward.default._schema
    values = {f"d_{name}": gradient for name, gradient in upstream.items()} | saved
    values.setdefault("is_cache_overwritable", False)
    values |= raw_arguments(*inputs, **options)
    values |= dict(zip(("needs_d_hidden", "needs_d_weight", "needs_d_bias"), needs, strict=True))
    return {argument.name: values.get(argument.name) for argument in schema.arguments}
