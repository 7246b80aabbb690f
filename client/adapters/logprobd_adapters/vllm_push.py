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

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from logprobd import WeightsClient
from logprobd.errors import InvalidArgument
from torch import Tensor
from vllm.distributed.weight_transfer import (
    Shard,
    TrainerWeightTransferEngine,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from logprobd_adapters.push import next_version, range_of_shard


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
    dtype: str | None = None
    """See logprobd.WeightsClient.push."""
    scoring_address: str | None = None
    """See logprobd.WeightsClient."""
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
        self._weights = WeightsClient(info.address, scoring_address=info.scoring_address)
        metas = [meta for meta in source.metadata if meta.name == info.tensor]
        if not metas:
            raise InvalidArgument(
                f'the source has no tensor "{info.tensor}": set tensor to the name of the head\'s '
                "weight"
            )
        self._meta = metas[0]
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
        """Moves the weights of one step. Called on every rank."""
        version = _from_sender(next_version(self._weights, self._info.head))
        is_local = self.source.implements_iter_local()
        for name, piece in self.source.iter_local() if is_local else self.source.iter_full():
            if name == self._info.tensor:
                self._push(piece, version, is_local)
        if self._inner is not None:
            self._inner.send_weights()
        _barrier()  # all rows have arrived
        if self.is_sender:
            self._weights.commit(self._info.head, version=version)
        _barrier()  # the next version is counted from this one

    def shutdown(self) -> None:
        self._weights.close()
        if self._inner is not None:
            self._inner.shutdown()

    def _push(self, piece: Tensor, version: int, is_local: bool) -> None:
        owners = self._meta.owners or (0,)
        if self.rank not in owners:
            return
        index = owners.index(self.rank)
        shape = self._meta.mesh_shape or (len(owners),)
        placements = self._meta.placements if is_local else None
        begin, end, is_first_replica = 0, self._meta.shape[0], index == 0
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
        if is_first_replica:
            self._weights.push(
                piece,
                version=version,
                head=self._info.head,
                row_begin=begin,
                vocab_rows=self._meta.shape[0],
                dtype=self._info.dtype,
            )


def _splits(placement: Any) -> bool:
    """Returns whether a mesh axis splits the rows. Raises InvalidArgument if it splits columns."""
    if isinstance(placement, Shard) and placement.dim != 0:
        raise InvalidArgument(
            "the head is sharded on its columns: use a source that implements iter_full alone"
        )
    return isinstance(placement, Shard)


def _from_sender(version: int) -> int:
    """Returns the number of the sender, which is rank 0 of the default process group."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return version
    versions = [version]
    torch.distributed.broadcast_object_list(versions, src=0)
    return versions[0]


def _barrier() -> None:
    """Waits for all trainer ranks: those of the default process group, as in vLLM's IPC engine."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()


WeightTransferTrainerFactory.register_engine("logprobd", LogprobdTrainerWeightTransferEngine)
