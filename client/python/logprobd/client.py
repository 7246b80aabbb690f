"""The synchronous client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from logprobd._core import ClientCore
from logprobd._threads import ThreadsPool, finish, iterate
from logprobd.info import HeadInfo, VerifyReport
from logprobd.result import ScoreResult
from logprobd.score_args import ScoreArgs, ScoreMethod


class Client(ClientCore, ScoreMethod[ScoreResult]):
    __doc__ = f"{ClientCore.__doc__}\n    Thread-safe.\n"

    _pool_class = ThreadsPool

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections, cancels requests in flight, and returns shared memory to the
        server. Arrays from `buffer` stay readable. Idempotent."""
        finish(self._close())

    def buffer(self, rows: int, hidden_size: int, dtype: Any = "bf16") -> Any:
        """Returns an uninitialised array whose rows a same-host server reads without a copy.

        Args:
            rows, hidden_size: the shape.
            dtype: "bf16" (gives NumPy uint16, to be scored with dtype="bf16"), "fp16", "fp32", or a
                NumPy or ml_dtypes type; a torch dtype gives a torch.Tensor.

        Returns an array [rows, hidden_size]. Its memory is freed with its last reference. It is an
        ordinary array if no memory can be shared, for example with several servers. Do not write
        rows while they are being scored.

        Raises InvalidArgument, Unavailable if transport is "shm" and it is not available, and the
        errors of list_heads, which finds out whether the server is on this host.
        """
        return finish(self._buffer(rows, hidden_size, dtype))

    def _run_score(self, args: ScoreArgs) -> ScoreResult:
        return finish(self._score(args))

    def score_stream(
        self,
        batches: Iterable[tuple[Any, Any] | Mapping[str, Any]],
        *,
        on_error: str = "raise",
        timeout: float | None = None,
        **options: Any,
    ) -> Iterator[ScoreResult]:
        """Scores many batches, over one stream per server, and yields the results in order.

        Batches are taken from the iterable while the streams have room, so it may be infinite. The
        calling thread takes them, so no result is yielded while the iterable computes the next
        batch. If the iterable waits for earlier results, use AsyncClient.

        Args:
            batches: tuples (hidden, targets), or mappings of `score` arguments that differ between
                batches, such as {"hidden": h, "targets": t, "segments": s}.
            on_error: "raise", or "return" to yield the LogprobdError instead of a failed batch's
                result and continue.
            timeout: seconds from sending a batch to its result. None means the client's timeout.
            options: further arguments of `score` for all batches, except progress.

        Raises the errors of `score`. DeadlineExceeded and lost connections always end the stream.
        """
        return iterate(self._stream(batches, on_error, timeout, options))

    def list_heads(self, *, timeout: float | None = None) -> list[HeadInfo]:
        """Returns the heads and their limits. With several servers, these are the lowest limits.

        Raises the errors of `score`.
        """
        return finish(self._list_heads(timeout))

    def info(self, head: str = "", *, timeout: float | None = None) -> HeadInfo:
        """Returns the description of one head; "" means the only head.

        Raises NotFound, InvalidArgument if there are several heads and `head` is "", and the errors
        of `score`.
        """
        return finish(self._info(head, timeout))

    def verify(
        self, rows: int = 0, seed: int = 0, *, head: str = "", timeout: float | None = None
    ) -> VerifyReport:
        """Makes the server, or one of several, compare its engine with a double-precision
        computation on synthetic rows.

        Args:
            rows: number of rows, 1 to 64; 0 means the server's default.
            seed: seed of the rows; the same seed gives the same rows. 0 means the server's default.
        """
        return finish(self._verify(rows, seed, head, timeout))

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until the server, or one of several, can score.

        Raises Unavailable with the last reason if no server can score in time, NotFound if another
        kind of gRPC server listens at the address, and HeadMismatch.
        """
        finish(self._wait_ready(timeout))
