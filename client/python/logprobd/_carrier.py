"""How the hidden states of a request travel to one server: in the message, through shared memory,
or as a handle of GPU memory. One Carrier a client; Client and AsyncClient ask it for each request.

With several servers rows travel in the message, since it may be sent again to another one.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from logprobd import _rows, _wire
from logprobd._cuda_ipc import CudaDriver, Driver, NotShareable
from logprobd._local import Lease, LocalUnavailable
from logprobd._regions import RegionPool, Span
from logprobd.errors import InvalidArgument, LogprobdError, Unavailable, is_about_a_slice
from logprobd.plan import Chunk, ScorePlan
from logprobd.settings import Settings

# Below it a request travels in its message: one copy more costs less than a slot.
INLINE_BYTES = 64 << 10
# Alignment of rows in a region, as local.proto wants it.
_SLICE_ALIGNMENT = 64
# After a failure TCP is used for this long before the local way is tried again.
RETRY_SECONDS = 10.0


class Way(NamedTuple):
    """How hidden states travelled."""

    transport: str
    """tcp, unix, shm or cuda_ipc."""
    reason: str
    """Why not a shorter way; "" where there is none."""


@dataclass
class Parcel:
    """A request, and what it holds until its answer has come."""

    request: bytes
    way: Way
    _lease: Lease | None = None
    _device: int | None = None
    _span: Span | None = None
    _tensor: Any = field(default=None, repr=False)

    def release(self) -> None:
        """Once the request is answered or given up. Idempotent.

        After a timeout or a lost connection the server may still read the slot; what is written
        there next then spoils the scores of that dead request alone.
        """
        span, self._span, self._tensor = self._span, None, None
        if span is not None:
            span.free()


class Carrier:
    """Decides the way of each request, and keeps the lease and the memory shared with the server.

    Nothing is opened before the server's first ListHeads says that it can be reached locally. Any
    thread may use it; a forked child starts anew.

    Args:
        driver: makes the Driver at the first CUDA tensor.
        clock: seconds, monotonic.
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
            else "several servers: rows travel in requests"
        )
        self.last = Way(self._inline, "nothing was scored yet")
        """What most rows of the latest call took."""
        self._access: _wire.LocalAccess | None = None
        self._is_offered = False
        self._driver: Driver | NotShareable | None = None  # None: not asked for yet
        self._reset()
        _live.add(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._lease: Lease | None = None
        self._pool: RegionPool | None = None
        self._closed = False
        self._failure = LocalUnavailable("the server was not asked yet")
        self._retry_at = 0.0
        self._lost_at = -RETRY_SECONDS  # when a lease was last lost
        self._devices_off: dict[int, tuple[str, float]] = {}  # reason, until when

    # --- what the clients call

    def offer(self, access: _wire.LocalAccess | None) -> None:
        """What ListHeads says of local access."""
        self._access, self._is_offered = access, True

    @property
    def needs_asking(self) -> bool:
        """Whether it was never said if there is local access."""
        return not self._is_offered and self._mode != "tcp"

    @property
    def needs_preparing(self) -> bool:
        """Whether `prepare` may take long now: it connects, and waits for memory."""
        return (
            self._mode != "tcp"
            and self._access is not None
            and self._lease is None
            and not self._closed
            and self._clock() >= self._retry_at
        )

    def prepare(self) -> None:
        """Connects and makes the first region, if that can be; else `pack` says why not."""
        try:
            lease, pool = self._connected()
            if lease.shared_memory and self._mode != "cuda-ipc":
                pool.prepare()
        except LocalUnavailable:
            pass

    def pack(self, plan: ScorePlan, chunk: Chunk, *, chunk_id: int = 0) -> Parcel:
        """The request of a chunk. Its hidden states are copied once, or not at all.

        Raises Unavailable when the transport that the settings demand cannot be had, and
        InvalidArgument when hidden states of this kind cannot take it.
        """
        mode = self._mode
        reason = self._tcp_reason
        size = (chunk.end - chunk.begin) * plan.hidden.row_bytes
        if size > 0 and mode != "tcp":
            reason = ""
            for allowed, pack in (
                (mode in ("auto", "cuda-ipc"), self._pack_device),
                (mode in ("auto", "shm"), self._pack_shared),
            ):
                if not allowed:
                    continue
                try:
                    return pack(plan, chunk, chunk_id, size, reason)
                except (LocalUnavailable, NotShareable) as error:
                    reason = _join(reason, str(error))
            if mode != "auto":
                raise Unavailable(
                    f'transport is "{mode}", which {self._settings.address} cannot give: {reason}'
                )
        request = plan.encode(chunk, chunk_id=chunk_id)
        return Parcel(request, Way(self._inline, reason))

    def refused(self, parcel: Parcel, error: LogprobdError) -> bool:
        """Whether `error` is about the way of a request and not about the request: it is then to be
        packed and sent again at once. No way is tried for ever."""
        lease = parcel._lease
        if lease is None or not is_about_a_slice(error):
            return False
        with self._lock:
            if lease is not self._lease:
                return True  # lost meanwhile; the next parcel has another
            if parcel._device is not None and " lease" not in str(error):
                if self._mode != "auto":
                    return False
                # Lasting where the server does not reach the GPU; else perhaps this memory's alone.
                is_lasting = error.code == "FAILED_PRECONDITION"
                until = float("inf") if is_lasting else self._clock() + RETRY_SECONDS
                self._devices_off[parcel._device] = (str(error), until)
                return True
            return self._lose(str(error))

    def used(self, way: Way) -> None:
        """The way of a call that has ended."""
        self.last = way

    def array(self, rows: int, hidden_size: int, dtype: Any) -> Any:
        """As Client.buffer."""
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
                        f'transport is "shm", which {self._settings.address} cannot give: {error}'
                    ) from None
                memory = np.empty(size, np.uint8)
        return make(memory, (rows, hidden_size))

    def close(self) -> None:
        """Gives the lease back. Idempotent. Arrays of `array` stay readable."""
        with self._lock:
            lease, self._lease, self._pool, self._closed = self._lease, None, None, True
        if lease is not None:
            lease.close()

    def forget_after_fork(self) -> None:
        """In a child: leaves the parent's lease alone; a new one is made at first use."""
        lease, closed = self._lease, self._closed
        self._reset()
        self._closed = closed
        if lease is not None:
            lease.close()  # this process's end of it; the parent's keeps the lease

    # --- the ways

    def _pack_shared(
        self, plan: ScorePlan, chunk: Chunk, chunk_id: int, size: int, reason: str
    ) -> Parcel:
        hidden, rows = plan.hidden, plan.chunk_rows(chunk)
        address = hidden.host_address(rows)
        here = None
        pool = self._pool
        if address is not None and pool is not None:
            here = pool.find(address, size)
        if here is None and size < INLINE_BYTES and self._mode == "auto":
            raise LocalUnavailable(f"a request of {size} bytes travels faster in its message")
        lease, current = self._shared()
        if here is not None and pool is current and here[1] % _SLICE_ALIGNMENT == 0:
            span, (region, offset) = None, here
        else:
            span = current.allocate(size)
            region, offset = span.region, span.offset
            try:
                if hidden.is_cuda and (driver := self._cuda()) is not None:
                    region.pin(driver)
                hidden.copy_to(rows, span.bytes)
            except BaseException:
                span.free()
                raise
        place = _wire.SharedMemorySlice(region.id, offset, size)
        request = plan.encode(chunk, chunk_id=chunk_id, place={"shared_memory": place})
        return Parcel(request, Way("shm", reason), lease, None, span)

    def _pack_device(
        self, plan: ScorePlan, chunk: Chunk, chunk_id: int, size: int, _: str
    ) -> Parcel:
        if not plan.hidden.is_cuda:
            if self._mode == "cuda-ipc":
                raise InvalidArgument(
                    'transport is "cuda-ipc", and hidden is not a CUDA tensor', field="hidden"
                )
            raise NotShareable("")  # nothing to explain
        lease, _pool = self._connected()
        if not lease.cuda_ipc:
            raise NotShareable("the server takes no GPU memory of other processes")
        tensor = plan.hidden.device_rows(plan.chunk_rows(chunk))
        device = int(tensor.device.index or 0)
        off, until = self._devices_off.get(device, ("", 0.0))
        if self._clock() < until:
            raise NotShareable(off)
        driver = self._cuda()
        if driver is None:
            raise NotShareable(str(self._driver))
        memory = driver.share(tensor)
        driver.wait(tensor)
        place = _wire.CudaIpcSlice(lease.id, memory.device_uuid, memory.handle, memory.offset, size)
        request = plan.encode(chunk, chunk_id=chunk_id, place={"cuda_ipc": place})
        return Parcel(request, Way("cuda_ipc", ""), lease, device, None, tensor)

    # --- the lease

    def _shared(self) -> tuple[Lease, RegionPool]:
        lease, pool = self._connected()
        if not lease.shared_memory:
            raise LocalUnavailable("the server shares no memory")
        return lease, pool

    def _connected(self) -> tuple[Lease, RegionPool]:
        """The lease and its memory. LocalUnavailable where there is none."""
        with self._lock:
            if self._lease is not None and not self._lease.is_alive:
                self._lose("the server ended the lease")
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
            raise LocalUnavailable("the server has no local socket")
        if self._clock() < self._retry_at and self._mode == "auto":
            raise self._failure
        try:
            return Lease(access, self._settings.client_id or "")
        except LocalUnavailable as error:
            self._failure, self._retry_at = error, self._clock() + RETRY_SECONDS
            raise

    def _lose(self, reason: str) -> bool:
        """Gives the lease up. Another is made at once, unless one was lost lately. Whether sending
        again makes sense."""
        lease, self._lease, self._pool = self._lease, None, None
        self._devices_off = {}
        if lease is not None:
            lease.close()
        now = self._clock()
        lately = now - self._lost_at < RETRY_SECONDS
        self._lost_at = now
        if lately:
            self._failure, self._retry_at = LocalUnavailable(reason), now + RETRY_SECONDS
        return not lately or self._mode == "auto"

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


_live: weakref.WeakSet[Carrier] = weakref.WeakSet()


def _forget_all() -> None:
    for carrier in list(_live):
        carrier.forget_after_fork()


os.register_at_fork(after_in_child=_forget_all)
