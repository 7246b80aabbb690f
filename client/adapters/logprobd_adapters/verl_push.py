"""Checkpoint engines of verl that also push the policy's head to a logprobd server.

For each backend NAME of verl's registry, the import of this module registers logprobd_NAME, which
sends all weights to the rollouts as NAME does:

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: logprobd_nccl
      custom_backend_module: logprobd_adapters.verl_push
      engine_kwargs:
        logprobd_nccl: {address: "scorer:8471"}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from logprobd import LogprobdError, WeightsClient
from logprobd.errors import InvalidArgument
from torch import Tensor
from verl.checkpoint_engine import CheckpointEngineRegistry

from logprobd_adapters.push import begin_version

# "naive" hands weights over within a process, and "delta_sharded" takes them from the model itself.
_WITHOUT_STREAM = ("naive", "delta_sharded")


class HeadTee:
    """Mixed into a checkpoint engine: pushes the head as it passes through send_weights.

    The master pushes the tensor and makes it live once all weights are sent. A failed push does not
    stop the transfer; its error is raised at the end.

    Args:
        address: address of the server's admin listener (logprobd --admin).
        head: name of the head; "" means the only head.
        tensor: name of the head's weight, for example "model.embed_tokens.weight" if it is tied.
        scoring_address: see logprobd.WeightsClient.
        bucket_size, is_master, engine_kwargs: arguments of the engine itself.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        address: str,
        head: str = "",
        tensor: str = "lm_head.weight",
        scoring_address: str | None = None,
        **engine_kwargs: Any,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            bucket_size=bucket_size, is_master=is_master, **engine_kwargs
        )
        self._weights = WeightsClient(address, scoring_address=scoring_address)
        self._head, self._tensor, self._pushes = head, tensor, is_master

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Sends the weights, and returns the engine's metrics and the version that is now live."""
        outcome: list[int | LogprobdError] = []
        passed = self._tee(weights, outcome) if self._pushes else weights
        metrics = await super().send_weights(passed, global_steps)  # type: ignore[misc]
        if not self._pushes:
            return metrics or {}
        if not outcome:
            raise InvalidArgument(
                f'no tensor is named "{self._tensor}": set tensor to the name of the head\'s weight'
            )
        version = outcome[0]
        if isinstance(version, LogprobdError):
            raise version
        self._weights.commit(self._head, version=version)
        return {**(metrics or {}), "logprobd/weights_version": version}

    def _tee(
        self, weights: Iterable[tuple[str, Tensor]], outcome: list[int | LogprobdError]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            if name == self._tensor:
                try:
                    version = begin_version(self._weights, self._head)
                    self._weights.push(weight, version=version, head=self._head)
                    outcome.append(version)
                except LogprobdError as error:
                    outcome.append(error)
            yield name, weight


def register(backend: str) -> None:
    """Registers logprobd_BACKEND for a backend of verl's registry."""
    engine = CheckpointEngineRegistry.get(backend)
    tee = type(f"Logprobd{engine.__name__}", (HeadTee, engine), {})
    CheckpointEngineRegistry.register(f"logprobd_{backend}")(tee)


for _backend in list(CheckpointEngineRegistry._registry):
    if _backend not in _WITHOUT_STREAM:
        register(_backend)
