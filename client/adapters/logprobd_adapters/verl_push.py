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

import asyncio
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from logprobd import Tls, WeightsClient
from logprobd.errors import InvalidArgument
from torch import Tensor
from verl.checkpoint_engine import CheckpointEngineRegistry

from logprobd_adapters.push import advice_on_names, begin_version, check_staged, collect_errors
from logprobd_adapters.scorer import read_token

# "naive" hands weights over within a process, and "delta_sharded" takes them from the model itself.
_WITHOUT_STREAM = ("naive", "delta_sharded")


class HeadTee:
    """Mixed into a checkpoint engine: pushes the head as it passes through send_weights.

    The master pushes the head and makes it live once all weights are sent. A failed push does not
    stop the transfer; its error is raised at the end.

    The engine takes the weights from a plain iterator, so a push runs within its step and holds up
    the event loop for as long as it takes, at most load_timeout. Other calls of the server do not.

    Args:
        address: address of the server's admin listener (logprobd --admin).
        head: name of the head; "" means the only head.
        tensor: name of the head's weight, for example "model.embed_tokens.weight" if it is tied.
        bias: name of the head's bias. A model without this tensor has none.
        dtype: see logprobd.WeightsClient.push. Needed if weight and bias have different types.
        tls: a logprobd.Tls, or its arguments, since a configuration holds no objects.
        token_file: file that holds the token alone, on the master. Default: LOGPROBD_TOKEN.
        scoring_address, timeout, load_timeout: see logprobd.WeightsClient.
        bucket_size, is_master, engine_kwargs: arguments of the engine itself.

    Raises InvalidArgument for `token`, since verl prints and logs its configuration.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        address: str,
        head: str = "",
        tensor: str = "lm_head.weight",
        bias: str = "lm_head.bias",
        dtype: str | None = None,
        scoring_address: str | None = None,
        timeout: float = 60.0,
        load_timeout: float | None = None,
        tls: Tls | Mapping[str, str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
        **engine_kwargs: Any,
    ) -> None:
        if "token" in engine_kwargs:
            raise InvalidArgument(
                "verl prints and logs its configuration, which must not contain a token: write it "
                "to a file and set token_file, or set the variable LOGPROBD_TOKEN"
            )
        super().__init__(  # type: ignore[call-arg]
            bucket_size=bucket_size, is_master=is_master, **engine_kwargs
        )
        self._head, self._tensor, self._bias, self._dtype = head, tensor, bias, dtype
        self._weights: WeightsClient | None = None
        if is_master:
            self._weights = WeightsClient(
                address,
                timeout=timeout,
                load_timeout=load_timeout,
                scoring_address=scoring_address,
                tls=Tls(**tls) if isinstance(tls, Mapping) else tls,
                token=None if token_file is None else read_token(token_file),
            )
            # verl calls finalize after each step, and nothing at the end.
            weakref.finalize(self, self._weights.close)

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Sends the weights, and returns the engine's metrics and the version that is now live."""
        client = self._weights
        if client is None:
            return await super().send_weights(weights, global_steps) or {}  # type: ignore[misc]
        errors: list[Exception] = []
        version, is_staged = 0, False
        with collect_errors(errors):
            version = await asyncio.to_thread(begin_version, client, self._head)

        def passed() -> Iterator[tuple[str, Tensor]]:
            nonlocal is_staged
            for name, tensor in weights:
                if name in (self._tensor, self._bias) and not errors:
                    is_bias = name == self._bias
                    with collect_errors(errors):
                        staged = client.push(
                            None if is_bias else tensor,
                            bias=tensor if is_bias else None,
                            version=version,
                            head=self._head,
                            dtype=self._dtype,
                        )
                        is_staged |= staged is not None
                yield name, tensor

        metrics = await super().send_weights(passed(), global_steps)  # type: ignore[misc]
        if errors:
            raise errors[0]
        check_staged(is_staged, advice_on_names(self._tensor, self._bias))
        await asyncio.to_thread(client.commit, self._head, version=version)
        return {**(metrics or {}), "logprobd/weights_version": version}


def register(backend: str) -> None:
    """Registers logprobd_BACKEND for a backend of verl's registry."""
    engine = CheckpointEngineRegistry.get(backend)
    tee = type(f"Logprobd{engine.__name__}", (HeadTee, engine), {})
    CheckpointEngineRegistry.register(f"logprobd_{backend}")(tee)


for _backend in list(CheckpointEngineRegistry._registry):
    if _backend not in _WITHOUT_STREAM:
        register(_backend)
