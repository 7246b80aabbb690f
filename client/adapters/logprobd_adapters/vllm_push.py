"""A trainer-side weight transfer engine of vLLM that pushes the head to a logprobd server.

The import registers the backend "logprobd" in vLLM's WeightTransferTrainerFactory. vLLM then runs
the body, by weights of another backend, and logprobd the head:

    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    info = LogprobdTrainerInitInfo(
        "scorer:8471", inner=NCCLTrainerInitInfo(..., rank=rank), rank=rank
    )
    engine = WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=ModuleSource(model)
    )
    engine.send_weights()  # on every rank, after each step
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from logprobd import LogprobdError, Tls, WeightsClient
from logprobd.errors import InvalidArgument
from torch import Tensor
from vllm.distributed.weight_transfer import (
    Shard,
    TrainerWeightTransferEngine,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from logprobd_adapters.push import begin_version, check_staged, collected, range_of_shard

_LOG = logging.getLogger("logprobd")


@dataclass
class LogprobdTrainerInitInfo(TrainerInitInfo):
    """Settings of the engine."""

    backend: ClassVar[str] = "logprobd"

    address: str
    """Address of the server's admin listener (logprobd --admin)."""
    head: str = ""
    """Name of the head; "" means the only head."""
    tensor: str = "lm_head.weight"
    """Name of the head's weight, for example "model.embed_tokens.weight" if it is tied."""
    bias: str = "lm_head.bias"
    """Name of the head's bias. A source without this tensor has none."""
    dtype: str | None = None
    """See logprobd.WeightsClient.push. Needed if weight and bias have different types."""
    scoring_address: str | None = None
    """See logprobd.WeightsClient, also for the settings up to `token`."""
    timeout: float = 60.0
    load_timeout: float | None = None
    tls: Tls | None = None
    token: str | None = field(default=None, repr=False)
    inner: TrainerInitInfo | None = None
    """The backend that sends all weights to vLLM. None: they go nowhere else."""


class LogprobdTrainerWeightTransferEngine(TrainerWeightTransferEngine[LogprobdTrainerInitInfo]):
    """Pushes the head, lets the inner engine send all weights to vLLM, and commits the head.

    Rows of a sharded weight are sent by their owners without a gather, if the source implements
    iter_local. Otherwise the first owner sends the full tensor.
    """

    init_info_cls = LogprobdTrainerInitInfo

    def __init__(self, info: LogprobdTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender, rank=info.rank)
        self._info = info
        self._weights = WeightsClient(
            info.address,
            timeout=info.timeout,
            load_timeout=info.load_timeout,
            scoring_address=info.scoring_address,
            tls=info.tls,
            token=info.token,
        )
        names = (info.tensor, info.bias)
        self._metas = {meta.name: meta for meta in source.metadata if meta.name in names}
        if info.tensor not in self._metas:
            raise InvalidArgument(
                f'the source has no tensor "{info.tensor}": set tensor to the name of the head\'s '
                "weight"
            )
        self._inner: Any = None
        if info.inner is not None:
            self._inner = WeightTransferTrainerFactory.trainer_init(
                info.inner, client=client, source=source
            )

    @classmethod
    def trainer_init(
        cls, init_info: LogprobdTrainerInitInfo, *, client: Any, source: Any = None
    ) -> LogprobdTrainerWeightTransferEngine:
        """Returns an engine on every rank. Raises InvalidArgument without a source."""
        if source is None:
            raise InvalidArgument("the backend logprobd needs a WeightSource")
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Moves the weights of one step. Called on every rank.

        All ranks take part in the same exchanges, whatever fails on one of them. A failed push does
        not stop the inner engine. Raises on all ranks if there was an error on any: its own on the
        rank that has one, otherwise a LogprobdError that names the rank. The next step drops what a
        failed one has left on the server.
        """
        errors: list[Exception] = []
        version, is_staged = 0, False
        if self.is_sender:
            with collected(errors):
                version = begin_version(self._weights, self._info.head)
        version = _from_sender(version)
        if version != 0:  # the server was reached
            with collected(errors):
                is_staged = self._push_head(version, errors)
        if self._inner is not None:
            with collected(errors):
                self._inner.send_weights()
        is_staged = _raise_together(errors, is_staged)  # all rows have arrived
        if self.is_sender:
            with collected(errors):
                check_staged(is_staged, self._info.tensor, self._info.bias)
                self._weights.commit(self._info.head, version=version)
        _raise_together(errors, is_staged)  # the next version is counted from this one

    def shutdown(self) -> None:
        self._weights.close()
        if self._inner is not None:
            self._inner.shutdown()

    def _push_head(self, version: int, errors: list[Exception]) -> bool:
        """Pushes this rank's part of the head. Returns whether that completed the version.

        After an error of a push, which is appended to `errors`, it continues to iterate over the
        source, as the other ranks do.
        """
        is_staged = False
        is_local = self.source.implements_iter_local()
        for name, piece in self.source.iter_local() if is_local else self.source.iter_full():
            if name in self._metas:
                with collected(errors):
                    is_staged |= self._push(name, piece, version, is_local)
        return is_staged

    def _push(self, name: str, piece: Tensor, version: int, is_local: bool) -> bool:
        meta = self._metas[name]
        owners = meta.owners or (0,)
        if self.rank not in owners:
            return False
        index = owners.index(self.rank)
        shape = meta.mesh_shape or (len(owners),)
        placements = meta.placements if is_local else None
        begin, end, is_first_replica = 0, meta.shape[0], index == 0
        if placements is not None:
            steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            axes = [(index // step % size, size) for step, size in zip(steps, shape, strict=True)]
            shards = [axis for axis, place in zip(axes, placements, strict=True) if _splits(place)]
            replicas = [
                axis
                for axis, place in zip(axes, placements, strict=True)
                if not isinstance(place, Shard)
            ]
            begin, end = range_of_shard(end, shards)
            is_first_replica = all(position == 0 for position, _ in replicas)
        if not is_first_replica:
            return False
        is_bias = name == self._info.bias
        staged = self._weights.push(
            None if is_bias else piece,
            bias=piece if is_bias else None,
            version=version,
            head=self._info.head,
            row_begin=begin,
            vocab_rows=self._metas[self._info.tensor].shape[0],
            dtype=self._info.dtype,
        )
        return staged is not None


def _splits(placement: Any) -> bool:
    """Returns whether a mesh axis splits the rows. Raises InvalidArgument if it splits columns."""
    if isinstance(placement, Shard) and placement.dim != 0:
        raise InvalidArgument(
            "the head is sharded on its columns: use a source that implements iter_full alone"
        )
    return isinstance(placement, Shard)


def _from_sender(version: int) -> int:
    """Returns the number of the sender, which is rank 0 of the default process group."""
    if not _has_ranks():
        return version
    versions = [version]
    torch.distributed.broadcast_object_list(versions, src=0)
    return versions[0]


def _raise_together(errors: list[Exception], is_staged: bool) -> bool:
    """Waits for all ranks, and raises on all of them if one has errors. Returns whether `is_staged`
    is true on one of them."""
    ours = (is_staged, [f"{type(error).__name__}: {error}" for error in errors])
    outcomes = [ours]
    if _has_ranks():
        outcomes = [ours] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(outcomes, ours)
    for error in errors[1:]:
        _LOG.error("a transfer of weights failed in another way, too", exc_info=error)
    if errors:
        raise errors[0]
    for rank, (_, texts) in enumerate(outcomes):
        if texts:
            raise LogprobdError(f"rank {rank} failed: {'; '.join(texts)}")
    return any(is_staged for is_staged, _ in outcomes)


def _has_ranks() -> bool:
    """Returns whether there are other trainer ranks: those of the default process group, as in
    vLLM's IPC engine."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


WeightTransferTrainerFactory.register_engine("logprobd", LogprobdTrainerWeightTransferEngine)
