"""The asyncio client."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from logprobd._asyncio import AsyncioPool
from logprobd._core import ClientCore
from logprobd.info import HeadInfo, VerifyReport
from logprobd.result import ScoreResult
from logprobd.score_args import ScoreArgs, ScoreMethod

_Batch = tuple[Any, Any] | Mapping[str, Any]


class AsyncClient(ClientCore, ScoreMethod[Coroutine[Any, Any, ScoreResult]]):
    __doc__ = f"""{ClientCore.__doc__}
    It has the methods of Client as coroutines. Encoding arrays and copying CUDA tensors blocks the
    event loop for a few milliseconds per request. Use a client on one event loop at a time.
    """

    _pool_class = AsyncioPool

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """See Client.close."""
        await self._close()

    async def buffer(self, rows: int, hidden_size: int, dtype: Any = "bf16") -> Any:
        """See Client.buffer."""
        return await self._buffer(rows, hidden_size, dtype)

    if not TYPE_CHECKING:  # a coroutine function also for inspect and unittest.mock

        @functools.wraps(ScoreMethod.score)
        async def score(self, *args: Any, **options: Any) -> ScoreResult:
            return await super().score(*args, **options)

    def _run_score(self, args: ScoreArgs) -> Coroutine[Any, Any, ScoreResult]:
        return self._score(args)

    def score_stream(
        self,
        batches: Iterable[_Batch] | AsyncIterable[_Batch],
        *,
        on_error: str = "raise",
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncIterator[ScoreResult]:
        """Like Client.score_stream; `batches` may also be an async iterable.

        An async iterable may wait for earlier results, because they are yielded while it waits.
        """
        return self._stream(batches, on_error, timeout, options)

    async def list_heads(self, *, timeout: float | None = None) -> list[HeadInfo]:
        """See Client.list_heads."""
        return await self._list_heads(timeout)

    async def info(self, head: str = "", *, timeout: float | None = None) -> HeadInfo:
        """See Client.info."""
        return await self._info(head, timeout)

    async def verify(
        self, rows: int = 0, seed: int = 0, *, head: str = "", timeout: float | None = None
    ) -> VerifyReport:
        """See Client.verify."""
        return await self._verify(rows, seed, head, timeout)

    async def wait_ready(self, timeout: float | None = None) -> None:
        """See Client.wait_ready."""
        await self._wait_ready(timeout)

    async def _prepare(self) -> None:
        if self._local.needs_preparing:
            await asyncio.to_thread(self._local.prepare)
