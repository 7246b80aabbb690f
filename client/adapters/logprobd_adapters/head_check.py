"""Compares the head of a Scorer with that of a model, when an adapter is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from logprobd.errors import InvalidArgument
from torch import Tensor

from logprobd_adapters.model_body import body_of, without_cache
from logprobd_adapters.scorer import DTYPES, Scorer

CHECKED_TOKENS = 8

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Types of the heads that are compared. The numbers of others are not the weights themselves, or
round so much that any head would be accepted."""

_RANDOM_IDS = 64  # Each row is compared at so many.
_FLOOR = 1e-3  # Errors of fp32 sums on CPUs and GPUs are below it, in nats.
_LARGEST = 4.0  # The largest difference may be so many times its allowance.
# The spacing of numbers at 1 in products of fp32 matrices, by PyTorch's setting.
_FP32_EPSILONS = {"highest": 2.0**-23, "high": 2.0**-10, "medium": 2.0**-7}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK_ROWS = 4096


def check_model_head(
    scorer: Scorer,
    model: Any,
    length: int = CHECKED_TOKENS,
    *,
    allow_rounded_head: bool = False,
) -> None:
    """Runs a Hugging Face model on a few tokens, and compares its logits with a scorer.

    Call it under the autocast of the model's other calls. Meanwhile the model is in evaluation
    mode, and the random numbers of the caller do not change.

    Args:
        model: the model, also as a PEFT model, with its own head.
        length: number of tokens, at most what the model takes.
        allow_rounded_head: see check_head.

    Raises InvalidArgument if the model has no separate body or the scorer's head is not that of the
    model; see check_head.
    """
    body = body_of(model)
    states: list[Tensor] = []
    hook = body.register_forward_hook(lambda *call: states.append(call[-1].last_hidden_state))
    tokens = torch.arange(min(length, CHECKED_TOKENS), device=body.device)[None]
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng([body.device] if tokens.is_cuda else []),
            _evaluation_mode(model),
        ):
            logits = model(input_ids=tokens, **without_cache(model)).logits
            if not states:  # OPT and others call a part of the body instead of the body
                body(input_ids=tokens, **without_cache(body))
    finally:
        hook.remove()
    weight = getattr(model.get_output_embeddings(), "weight", None)
    check_head(scorer, states[0][0], logits[0], weight, allow_rounded_head=allow_rounded_head)


@contextmanager
def _evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switches off dropout, which would change states when the body runs a second time.

    eval() and train() are not called: a module may do more in them, and not all are in one mode.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_size(scorer: Scorer, hidden_size: int | None, vocab_rows: int) -> None:
    """Compares the size of a scorer's head with that of a model's, whose last rows may be padding.

    Args:
        hidden_size: of the model's head; None if it is not known.
        vocab_rows: number of the model's logits.

    Raises InvalidArgument if the head of the scorer has another hidden size or more ids.
    """
    if hidden_size not in (None, scorer.hidden_size):
        raise InvalidArgument(
            f"the model has hidden size {hidden_size}, but the head of the scorer "
            f"{scorer.hidden_size}: use a scorer of the model's head"
        )
    if scorer.vocab_size > vocab_rows:
        raise InvalidArgument(
            f"the model has {vocab_rows} logits, but the head of the scorer {scorer.vocab_size} "
            "ids, which would share the probability: use a scorer of the model's head"
        )


def check_head(
    scorer: Scorer,
    hidden: Tensor,
    logits: Tensor,
    weight: Tensor | None = None,
    *,
    allow_rounded_head: bool = False,
) -> None:
    """Compares a scorer with a model's own logits, for the most likely id and random ids.

    A model rounds: the inputs of its head to the type of the product, and logits to their type. A
    log-probability then differs by some u * (|z| + E|z| + rms(z)), where u is half of the spacing
    of that type at 1, z is the logit, E|z| is the mean over the probabilities, which the logsumexp
    takes, and rms(z) is over the vocabulary, in place of the sizes of the products. In 2,500
    simulated heads with and without cap, scale, bias, outliers and rounded inputs, the root mean
    square of the differences was at most 0.7 of this, and the largest 2.0. Allowed are 1 and 4, and
    0.001 nats for the errors of fp32.

    u is of the model alone. A scorer whose head has a coarser type is accepted if the model's
    weights are numbers of that type, as those of a bf16 checkpoint that was loaded in fp32 are.

    Args:
        hidden: [rows, H], the input of the model's head.
        logits: [rows, V], what the model computes from it. Ids from scorer.vocab_size on are
            padding.
        weight: the weight of the model's head, if it has one.
        allow_rounded_head: whether the scorer's head may be the model's, rounded to a coarser type.

    Raises InvalidArgument if the scorer's head is not that of the model, or if one of the two has a
    type that is not among FLOAT_DTYPES, as quantised heads do.
    """
    check_size(scorer, hidden.shape[1], logits.shape[1])
    of_model = _coarsest_dtype(hidden, logits, weight)
    own_dtype = getattr(scorer, "dtype", None)
    of_scorer = of_model if own_dtype is None else _float_dtype("the scorer's head", own_dtype)
    unit = max(_fp32_epsilon(), torch.finfo(of_model).eps) / 2
    rounded_unit = max(unit, torch.finfo(of_scorer).eps / 2)
    logits = logits[:, : scorer.vocab_size].to(hidden.device).float()
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(scorer.vocab_size, (len(hidden), _RANDOM_IDS), generator=random)
    ids = torch.cat([logits.argmax(-1, keepdim=True), ids.to(hidden.device)], 1)
    scores = scorer.score(hidden, ids[:, 0], candidates=ids[:, 1:].contiguous())
    scored = torch.cat([scores.logprob[:, None], scores.candidate_logprobs], 1)
    expected = logits.log_softmax(-1)
    # Equal infinities do not differ.
    differences = torch.where(
        scored == expected.gather(1, ids), 0, scored - expected.gather(1, ids)
    ).abs()
    sizes = torch.where(logits.isfinite(), logits, 0).abs()
    of_lse = (expected.exp() * sizes).sum(-1, keepdim=True)
    of_products = sizes.square().mean(-1, keepdim=True).sqrt()
    spread = sizes.gather(1, ids) + of_lse + of_products
    is_near = _explains(_FLOOR + rounded_unit * spread, differences)
    is_exact = rounded_unit == unit or (
        _explains(_FLOOR + unit * spread, differences) and _has_numbers_of(of_scorer, weight)
    )
    if is_near and (is_exact or allow_rounded_head):
        return
    found = (
        f"logprobs of the scorer differ from the model's by up to {differences.max():.2g} nats "
        f"and {differences.square().mean().sqrt():.2g} in the root mean square of "
        f"{differences.numel()}"
    )
    of_scorer_name, of_model_name = (_NAMES.get(each, str(each)) for each in (of_scorer, of_model))
    dtypes = f"the scorer's head is {of_scorer_name} and the model's {of_model_name}"
    if is_near:
        raise InvalidArgument(
            f"{found}, because {dtypes}, whose weights are rounded there: use a scorer of the head "
            f"in {of_model_name}, load the model in {of_scorer_name}, or accept this rounding by "
            "allow_rounded_head=True (logprobd-gateway: --allow-rounded-head)"
        )
    allowed = _FLOOR + rounded_unit * spread
    raise InvalidArgument(
        f"{found}, more than rounding explains ({allowed.square().mean().sqrt():.2g})"
        f"{'' if of_scorer == of_model else f', and {dtypes}'}: use a scorer of the model's head, "
        "and the same version of it"
    )


def _explains(allowed: Tensor, differences: Tensor) -> bool:
    relative = differences / allowed
    return bool(relative.square().mean().sqrt() <= 1 and relative.max() <= _LARGEST)


def _has_numbers_of(dtype: torch.dtype, weight: Tensor | None) -> bool:
    """Returns whether a weight has numbers of a type only, or is not known."""
    return (
        weight is None
        or weight.is_meta
        or all(
            torch.equal(rows, rows.to(dtype).to(rows.dtype))
            for rows in weight.detach().split(_CHUNK_ROWS)
        )
    )


def _coarsest_dtype(hidden: Tensor, logits: Tensor, weight: Tensor | None) -> torch.dtype:
    """Returns the coarsest type in which a model computes its head.

    The logits alone do not show it: a model may compute them in bf16 and return fp32.
    """
    kind = logits.device.type
    dtypes = {
        "the input of the model's head": hidden.dtype,
        "the model's logits": logits.dtype,
        "the model's head": None if weight is None else weight.dtype,
        "autocast": torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
    }
    found = [_float_dtype(name, dtype) for name, dtype in dtypes.items() if dtype is not None]
    return max(found, key=lambda dtype: torch.finfo(dtype).eps)


def _fp32_epsilon() -> float:
    """Returns the spacing of numbers at 1 in products of fp32 matrices."""
    try:
        return _FP32_EPSILONS[torch.get_float32_matmul_precision()]
    except RuntimeError:  # the precision was set by torch.backends.fp32_precision
        return _FP32_EPSILONS["high"]


def _float_dtype(name: str, dtype: torch.dtype | str) -> torch.dtype:
    """Returns a type, also from its name, which a scorer of a user's own may have.

    `name` is what has the type. Raises InvalidArgument if it is not among FLOAT_DTYPES.
    """
    plain = str(dtype).removeprefix("torch.")
    found = DTYPES.get(plain, getattr(torch, plain, None))
    if found not in FLOAT_DTYPES:
        raise InvalidArgument(
            f"the type of {name} is {dtype}, so the head of the model cannot be compared with the "
            "scorer's: use a head in bf16, fp16 or fp32, which is not quantised (in transformers: "
            'quantise without the module "lm_head")'
        )
    assert isinstance(found, torch.dtype)
    return found
