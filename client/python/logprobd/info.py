"""What a server says of itself: heads, limits, verification."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from logprobd import _wire
from logprobd.errors import InvalidArgument, NotFound


@dataclass(frozen=True)
class Limits:
    """What one request may hold. The client cuts calls to keep them."""

    message_bytes_max: int
    request_rows_max: int
    top_k_max: int
    candidates_max: int
    segments_max: int
    stream_window: int


@dataclass(frozen=True)
class Shard:
    """A part of a head's vocabulary and the device that holds it."""

    replica: int
    """From 0; each holds one whole head."""
    shard: int
    """From 0, in the order of the vocabulary."""
    device: str
    """As "gpu0" or "cpu"."""
    vocab_begin: int
    vocab_end: int
    """One beyond the last id."""


@dataclass(frozen=True)
class HeadInfo:
    """A head that the server holds."""

    name: str
    model_type: str
    vocab_size: int
    """Valid ids: targets lie in [0, vocab_size)."""
    vocab_rows: int
    """Rows of the weight, padding included."""
    hidden_size: int
    dtype: str
    """Type of the weight: "bf16", "fp16" or "fp32"."""
    weights_version: int
    ready: bool
    tied: bool
    """The weight is the input embedding."""
    scale: float
    """Logits are multiplied by it."""
    softcap: float
    """Logits become softcap * tanh(logits / softcap); 0: they do not."""
    has_bias: bool
    tensor: str
    """Name of the tensor in the checkpoint."""
    engine: str
    weight_bytes: int
    limits: Limits
    transports: tuple[str, ...]
    layout: tuple[Shard, ...]
    """Replica by replica, shard by shard; empty from an older server."""
    server_version: str


@dataclass(frozen=True)
class VerifyReport:
    """The server's comparison of its engine with double precision on a seeded probe."""

    passed: bool
    rows: int
    logprob_difference_max: float
    entropy_difference_max: float
    logprob_tolerance: float
    entropy_tolerance: float
    logit_stddev: float
    """Of the probe's logits: near 0 would prove nothing."""
    weights_version: int
    engine: str
    seconds: float


def heads_from_wire(response: _wire.ListHeadsResponse) -> list[HeadInfo]:
    heads = []
    for head in response.heads:
        facts = dict(vars(head))
        facts["dtype"] = _wire.DTYPE_NAMES.get(head.dtype, "unknown")
        facts["limits"] = Limits(**vars(head.limits))
        facts["transports"] = tuple(head.transports)
        facts["layout"] = tuple(Shard(**vars(shard)) for shard in head.layout)
        heads.append(HeadInfo(**facts, server_version=response.server_version))
    return heads


def choose_head(heads: list[HeadInfo], name: str) -> HeadInfo:
    """The head called `name`, or the only one for "". NotFound, InvalidArgument."""
    names = ", ".join(f'"{head.name}"' for head in heads) or "none"
    if not name and len(heads) == 1:
        return heads[0]
    if not name and heads:
        raise InvalidArgument(f"the server holds several heads ({names}): pass head=", field="head")
    for head in heads:
        if head.name == name:
            return head
    raise NotFound(f'no head "{name}"; the server holds: {names}')


# Facts on which scores depend; servers that differ in one cannot share a call.
_SCORING_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "dtype",
    "scale",
    "softcap",
    "has_bias",
)


def heads_differ(first: Sequence[HeadInfo], second: Sequence[HeadInfo]) -> str:
    """How the heads of two servers differ in what scores depend on; "" where they do not."""
    others = {head.name: head for head in second}
    if {head.name for head in first} != set(others):
        names = [", ".join(sorted(head.name for head in heads)) for heads in (first, second)]
        return f'their names are "{names[0]}" and "{names[1]}"'
    for head in first:
        for fact in _SCORING_FIELDS:
            values = getattr(head, fact), getattr(others[head.name], fact)
            if values[0] != values[1]:
                return f'{fact} of "{head.name}" is {values[0]} and {values[1]}'
    return ""


def least_limits(heads: Sequence[HeadInfo]) -> HeadInfo:
    """One head as several servers hold it: the facts of the first, the tightest of all limits."""

    def least(name: str) -> int:
        return min((v for head in heads if (v := getattr(head.limits, name)) > 0), default=0)

    limits = Limits(**{limit.name: least(limit.name) for limit in dataclasses.fields(Limits)})
    return dataclasses.replace(heads[0], limits=limits)
