"""Describes a server: heads, limits and the verification report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from logprobd import _wire
from logprobd.errors import InvalidArgument, NotFound


@dataclass(frozen=True)
class Limits:
    """Limits of one request. The client splits larger calls."""

    message_bytes_max: int
    request_rows_max: int
    top_k_max: int
    candidates_max: int
    segments_max: int
    stream_window: int


@dataclass(frozen=True)
class Shard:
    """A range of a head's vocabulary and the device that holds it."""

    replica: int
    """Number of the replica, from 0. Each replica holds one whole head."""
    shard: int
    """Number of the shard, from 0, in the order of the vocabulary."""
    device: str
    """Name of the device, for example "gpu0" or "cpu"."""
    vocab_begin: int
    """First id."""
    vocab_end: int
    """One past the last id."""


@dataclass(frozen=True)
class HeadInfo:
    """A head that the server holds."""

    name: str
    model_type: str
    vocab_size: int
    """Number of valid ids. Targets must be in [0, vocab_size)."""
    vocab_rows: int
    """Number of rows of the weight, including padding."""
    hidden_size: int
    dtype: str
    """Type of the weight: "bf16", "fp16" or "fp32"."""
    weights_version: int
    ready: bool
    tied: bool
    """Whether the weight is the input embedding."""
    scale: float
    """Factor by which logits are multiplied."""
    softcap: float
    """Logits become softcap * tanh(logits / softcap); 0 leaves them unchanged."""
    has_bias: bool
    tensor: str
    """Name of the tensor in the checkpoint."""
    engine: str
    weight_bytes: int
    limits: Limits
    transports: tuple[str, ...]
    layout: tuple[Shard, ...]
    """All shards, ordered by replica and then by shard. Empty if the server is an old version."""
    warnings: tuple[str, ...]
    """What is surprising about how the head was found in its files, such as a model type that is
    not known. Empty if the server is an old version."""
    server_version: str


@dataclass(frozen=True)
class VerifyReport:
    """The server's comparison of its engine with double precision, on seeded synthetic rows."""

    passed: bool
    rows: int
    logprob_difference_max: float
    entropy_difference_max: float
    logprob_tolerance: float
    entropy_tolerance: float
    logit_stddev: float
    """Standard deviation of the logits. If it is near 0, the test is meaningless."""
    weights_version: int
    engine: str
    seconds: float


def heads_from_wire(response: _wire.ListHeadsResponse) -> list[HeadInfo]:
    """Converts an answer to ListHeads."""
    heads = []
    for head in response.heads:
        fields = dict(vars(head))
        fields["dtype"] = _wire.DTYPE_NAMES.get(head.dtype, "unknown")
        fields["limits"] = Limits(**vars(head.limits))
        fields["transports"] = tuple(head.transports)
        fields["layout"] = tuple(Shard(**vars(shard)) for shard in head.layout)
        fields["warnings"] = tuple(head.warnings)
        heads.append(HeadInfo(**fields, server_version=response.server_version))
    return heads


def choose_head(heads: list[HeadInfo], name: str) -> HeadInfo:
    """Returns the head called `name`, or the only head for "".

    Raises NotFound, and InvalidArgument if there are several heads and no name.
    """
    names = ", ".join(f'"{head.name}"' for head in heads) or "none"
    if not name and len(heads) == 1:
        return heads[0]
    if not name and heads:
        raise InvalidArgument(f"the server holds several heads ({names}): pass head=", field="head")
    for head in heads:
        if head.name == name:
            return head
    raise NotFound(f'no head "{name}"; the server holds: {names}')


# Fields on which scores depend. Servers that differ in one of them cannot share a call.
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
    """Describes the first difference in two servers' heads that affects scores, or returns ""."""
    others = {head.name: head for head in second}
    if {head.name for head in first} != set(others):
        names = [", ".join(sorted(head.name for head in heads)) for heads in (first, second)]
        return f'their names are "{names[0]}" and "{names[1]}"'
    for head in first:
        for name in _SCORING_FIELDS:
            values = getattr(head, name), getattr(others[head.name], name)
            if values[0] != values[1]:
                return f'{name} of "{head.name}" is {values[0]} and {values[1]}'
    return ""


def least_limits(heads: Sequence[HeadInfo]) -> HeadInfo:
    """Returns the first server's description of a head, with the lowest limits of all servers."""

    def least(name: str) -> int:
        return min((v for head in heads if (v := getattr(head.limits, name)) > 0), default=0)

    limits = Limits(**{limit.name: least(limit.name) for limit in dataclasses.fields(Limits)})
    return dataclasses.replace(heads[0], limits=limits)
