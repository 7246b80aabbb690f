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
from dataclasses import dataclass, field
from typing import Any, ClassVar

from logprobd import Tls, WeightsClient
from logprobd.errors import InvalidArgument
from torch import Tensor
from vllm.distributed.weight_transfer import (
    Shard,
    TrainerWeightTransferEngine,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from logprobd_adapters.push import advice_on_names, collect_errors, move_version, rows_of_rank


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

        A failed push does not stop the inner engine. Raises on all ranks if there was an error on
        any; see logprobd_adapters.push.move_version.
        """

        def send(version: int, errors: list[Exception]) -> bool:
            is_staged = False
            if version != 0:  # the server was reached
                with collect_errors(errors):
                    is_staged = self._push_head(version, errors)
            if self._inner is not None:
                self._inner.send_weights()
            return is_staged

        move_version(
            self._weights,
            send,
            advice=advice_on_names(self._info.tensor, self._info.bias),
            head=self._info.head,
            is_first=self.is_sender,
        )

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
                with collect_errors(errors):
                    is_staged |= self._push(name, piece, version, is_local)
        return is_staged

    def _push(self, name: str, piece: Tensor, version: int, is_local: bool) -> bool:
        meta = self._metas[name]
        owners = meta.owners or (0,)
        if self.rank not in owners:
            return False
        index = owners.index(self.rank)
        placements = meta.placements if is_local else None
        begin, end, is_first_replica = 0, meta.shape[0], index == 0
        if placements is not None:
            shape = meta.mesh_shape or (len(owners),)
            steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            axes = [
                (index // step % size, size, _splits(place))
                for step, size, place in zip(steps, shape, placements, strict=True)
            ]
            begin, end, is_first_replica = rows_of_rank(end, axes)
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


WeightTransferTrainerFactory.register_engine("logprobd", LogprobdTrainerWeightTransferEngine)
