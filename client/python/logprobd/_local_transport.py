"""Passes the rows of a request to the server: inside the message, through shared memory, or as a
handle of GPU memory.

Each client has one LocalTransport and asks it for the placement of every request. With several
servers, rows are always sent inside the message, since it may be sent again to another server.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from logprobd import _rows, _wire
from logprobd._cuda_ipc import CudaDriver, Driver, NotShareable
from logprobd._local_lease import Lease, LocalUnavailable
from logprobd._regions import RegionPool, Span
from logprobd.arrays import HiddenRows, Rows
from logprobd.errors import InvalidArgument, LogprobdError, Unavailable, is_placement_refusal
from logprobd.plan import Chunk, Placement, ScorePlan
from logprobd.settings import Settings

# Smaller requests contain their rows, because one more copy costs less than allocating a span.
INLINE_BYTES = 64 << 10
# Required alignment of rows in a region, in bytes (local.proto).
_SLICE_ALIGNMENT = 64
# After a failure, rows are sent inside requests for this time before shared memory is tried again.
RETRY_SECONDS = 10.0


RowsAt = Mapping[str, _wire.SharedMemorySlice | _wire.CudaIpcSlice]
"""The field of a request that locates its rows in shared or GPU memory, and its value."""

Encode = Callable[[RowsAt | None], bytes]
"""Encodes a request. Without a location it contains the rows."""


@dataclass
class PlacedChunk:
    """An encoded request, and the memory that it holds until it is answered."""

    request: bytes
    placement: Placement
    _lease: Lease | None = None
    _device: int | None = None
    _span: Span | None = None
    _tensor: Any = field(default=None, repr=False)

    def release(self) -> None:
        """Frees the memory. Call it once the request is answered or abandoned. Idempotent.

        After a timeout or a lost connection the server may still read the memory. Data written
        there next then changes only the scores of the abandoned request.
        """
        span, self._span, self._tensor = self._span, None, None
        if span is not None:
            span.free()


class LocalTransport:
    """Places each request, and keeps the lease and the memory shared with a same-host server.

    It opens no connection before the first answer to ListHeads says that the server is on this
    host. Thread-safe. A forked child starts without a lease.

    Args:
        driver: creates the Driver when the first CUDA tensor is scored.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        driver: Callable[[], Driver] = CudaDriver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._make_driver = driver
        self._clock = clock
        self._mode = settings.transport if settings.is_one_server else "tcp"
        self._inline = "unix" if settings.is_unix else "tcp"
        self._tcp_reason = (
            'transport is "tcp"'
            if settings.is_one_server
            else "with several servers, rows are sent inside requests"
        )
        self.last = Placement(self._inline, "nothing has been scored yet")
        """The placement of most rows of the latest call."""
        self._access: _wire.LocalAccess | None = None
        self._is_offered = False
        self._driver: Driver | NotShareable | None = None  # None until it is created
        self._reset()
        _live.add(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._lease: Lease | None = None
        self._pool: RegionPool | None = None
        self._closed = False
        self._failure = LocalUnavailable("the server has not been asked yet")
        self._retry_at = 0.0
        self._lost_at = -RETRY_SECONDS  # time of the latest loss of a lease
        self._devices_off: dict[int, tuple[str, float]] = {}  # reason and end time by device

    # --- called by the clients

    def offer(self, access: _wire.LocalAccess | None) -> None:
        """Stores the same-host access that ListHeads describes, or None if there is none."""
        self._access, self._is_offered = access, True

    @property
    def needs_asking(self) -> bool:
        """True if ListHeads must be called first, because `offer` was never called."""
        return not self._is_offered and self._mode != "tcp"

    @property
    def needs_preparing(self) -> bool:
        """True if `prepare` would connect and wait for memory now, which may take long."""
        return (
            self._mode != "tcp"
            and self._access is not None
            and self._lease is None
            and not self._closed
            and self._clock() >= self._retry_at
        )

    def prepare(self) -> None:
        """Connects and creates the first region if possible. `place` reports a failure."""
        try:
            lease, pool = self._connected()
            if lease.shared_memory and self._mode != "cuda-ipc":
                pool.prepare()
        except LocalUnavailable:
            pass

    def place(self, plan: ScorePlan, chunk: Chunk, *, chunk_id: int = 0) -> PlacedChunk:
        """Returns the request of a chunk. See place_rows."""

        def encode(rows_at: RowsAt | None) -> bytes:
            return plan.encode(chunk, chunk_id=chunk_id, rows_at=rows_at)

        rows = plan.chunk_rows(chunk)
        return self.place_rows(plan.hidden, rows, plan.bytes_of(chunk), encode)

    def place_rows(self, hidden: HiddenRows, rows: Rows, size: int, encode: Encode) -> PlacedChunk:
        """Returns a request with some rows, which have `size` bytes. Copies them at most once.

        Raises Unavailable if the transport that the settings require is not available, and
        InvalidArgument if that transport does not support rows of this kind.
        """
        mode = self._mode
        reason = self._tcp_reason
        if size > 0 and mode != "tcp":
            reason = ""
            for allowed, place in (
                (mode in ("auto", "cuda-ipc"), self._place_on_device),
                (mode in ("auto", "shm"), self._place_in_region),
            ):
                if not allowed:
                    continue
                try:
                    return place(hidden, rows, size, encode, reason)
                except (LocalUnavailable, NotShareable) as error:
                    reason = _join(reason, str(error))
            if mode != "auto":
                raise Unavailable(
                    f'transport is "{mode}", which is not available at {self._settings.address}: '
                    f"{reason}"
                )
        return PlacedChunk(encode(None), Placement(self._inline, reason))

    def refused(self, placed: PlacedChunk, error: LogprobdError) -> bool:
        """Returns True if `error` concerns the placement of the request, so that the request is to
        be placed and sent again at once. The number of such repetitions is bounded."""
        lease = placed._lease
        if lease is None or not is_placement_refusal(error):
            return False
        with self._lock:
            if lease is not self._lease:
                return True  # the lease was lost meanwhile; the next placement uses another one
            if placed._device is not None and " lease" not in str(error):
                if self._mode != "auto":
                    return False
                # FAILED_PRECONDITION means that the server can never use this GPU. Other errors may
                # be temporary.
                is_lasting = error.code == "FAILED_PRECONDITION"
                until = float("inf") if is_lasting else self._clock() + RETRY_SECONDS
                self._devices_off[placed._device] = (str(error), until)
                return True
            return self._drop_lease(str(error))

    def abandon(self) -> None:
        """Drops the lease after a request without an answer, so that memory which the server may
        still read is not used again."""
        with self._lock:
            self._drop_lease("a request was abandoned")

    def used(self, placement: Placement) -> None:
        """Records the placement of a call that has ended."""
        self.last = placement

    def array(self, rows: int, hidden_size: int, dtype: Any) -> Any:
        """See Client.buffer."""
        if rows < 0 or hidden_size < 0:
            raise InvalidArgument(f"shape is ({rows}, {hidden_size}): it must not be negative")
        element_bytes, make = _rows.buffer_type(dtype)
        size = rows * hidden_size * element_bytes
        memory = np.zeros(0, np.uint8)
        if size > 0:
            try:
                if self._mode == "tcp":
                    raise LocalUnavailable(self._tcp_reason)
                memory = self._shared()[1].array(size)
            except LocalUnavailable as error:
                if self._mode == "shm":
                    raise Unavailable(
                        f'transport is "shm", which is not available at {self._settings.address}: '
                        f"{error}"
                    ) from None
                memory = np.empty(size, np.uint8)
        return make(memory, (rows, hidden_size))

    def close(self) -> None:
        """Returns the lease to the server. Idempotent. Arrays from `array` stay readable."""
        with self._lock:
            lease, self._lease, self._pool, self._closed = self._lease, None, None, True
        if lease is not None:
            lease.close()

    def forget_after_fork(self) -> None:
        """Drops the lease in a forked child, which gets its own later. The parent's lease lives."""
        lease, closed = self._lease, self._closed
        self._reset()
        self._closed = closed
        if lease is not None:
            lease.close()  # closes the child's descriptor only, so the lease stays alive

    # --- placements

    def _place_in_region(
        self, hidden: HiddenRows, rows: Rows, size: int, encode: Encode, reason: str
    ) -> PlacedChunk:
        address = hidden.host_address(rows)
        here = None
        pool = self._pool
        if address is not None and pool is not None:
            here = pool.find(address, size)
        if here is None and size < INLINE_BYTES and self._mode == "auto":
            raise LocalUnavailable(
                f"for {size} bytes, sending the rows inside the request is faster"
            )
        lease, current = self._shared()
        span = None
        if here is not None and pool is current and here[1] % _SLICE_ALIGNMENT == 0:
            region, offset = here
        else:
            span = current.allocate(size)
            region, offset = span.region, span.offset
        try:
            if span is not None:
                if hidden.is_cuda and (driver := self._cuda()) is not None:
                    region.pin(driver)
                hidden.copy_to(rows, span.bytes)
            request = encode({"shared_memory": _wire.SharedMemorySlice(region.id, offset, size)})
        except BaseException:
            if span is not None:
                span.free()
            raise
        return PlacedChunk(request, Placement("shm", reason), lease, None, span)

    def _place_on_device(
        self, hidden: HiddenRows, rows: Rows, size: int, encode: Encode, _: str
    ) -> PlacedChunk:
        if not hidden.is_cuda:
            if self._mode == "cuda-ipc":
                raise InvalidArgument(
                    'transport is "cuda-ipc", and hidden is not a CUDA tensor', field="hidden"
                )
            raise NotShareable("")  # no reason to report: the rows are in host memory
        lease, _pool = self._connected()
        if not lease.cuda_ipc:
            raise NotShareable("the server does not read GPU memory of other processes")
        tensor = hidden.device_rows(rows)
        device = int(tensor.device.index or 0)
        off, until = self._devices_off.get(device, ("", 0.0))
        if self._clock() < until:
            raise NotShareable(off)
        driver = self._cuda()
        if driver is None:
            raise NotShareable(str(self._driver))
        memory = driver.share(tensor)
        driver.wait(tensor)
        slice_ = _wire.CudaIpcSlice(
            lease.id, memory.device_uuid, memory.handle, memory.offset, size
        )
        request = encode({"cuda_ipc": slice_})
        return PlacedChunk(request, Placement("cuda_ipc", ""), lease, device, None, tensor)

    # --- the lease

    def _shared(self) -> tuple[Lease, RegionPool]:
        lease, pool = self._connected()
        if not lease.shared_memory:
            raise LocalUnavailable("the server shares no memory")
        return lease, pool

    def _connected(self) -> tuple[Lease, RegionPool]:
        """Returns the lease and its memory. Raises LocalUnavailable if there is none."""
        with self._lock:
            if self._lease is not None and not self._lease.is_alive:
                self._drop_lease("the server ended the lease")
            if self._lease is None:
                self._lease = self._connect()
                size = self._settings.chunk_bytes * self._settings.max_inflight
                self._pool = RegionPool(self._lease, size)
            assert self._pool is not None
            return self._lease, self._pool

    def _connect(self) -> Lease:
        if self._closed:
            raise LocalUnavailable("the client is closed")
        access = self._access
        if access is None:
            raise LocalUnavailable("the server has no control socket")
        if self._clock() < self._retry_at and self._mode == "auto":
            raise self._failure
        try:
            return Lease(access, self._settings.client_id or "")
        except LocalUnavailable as error:
            self._failure, self._retry_at = error, self._clock() + RETRY_SECONDS
            raise

    def _drop_lease(self, reason: str) -> bool:
        """Drops the lease. The next request connects again, unless another lease was lost less than
        RETRY_SECONDS ago. Returns whether to send the failed request again."""
        lease, self._lease, self._pool = self._lease, None, None
        self._devices_off = {}
        if lease is not None:
            lease.close()
        now = self._clock()
        was_lost_recently = now - self._lost_at < RETRY_SECONDS
        self._lost_at = now
        if was_lost_recently:
            self._failure, self._retry_at = LocalUnavailable(reason), now + RETRY_SECONDS
        return not was_lost_recently or self._mode == "auto"

    def _cuda(self) -> Driver | None:
        with self._lock:
            if self._driver is None:
                try:
                    self._driver = self._make_driver()
                except NotShareable as error:
                    self._driver = error
            return None if isinstance(self._driver, NotShareable) else self._driver


def _join(first: str, second: str) -> str:
    return "; ".join(dict.fromkeys(part for part in (first, second) if part))


_live: weakref.WeakSet[LocalTransport] = weakref.WeakSet()


def _forget_all() -> None:
    for transport in list(_live):
        transport.forget_after_fork()


os.register_at_fork(after_in_child=_forget_all)
