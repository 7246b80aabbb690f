"""Regions of memory shared with a same-host server, and spans allocated from them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from logprobd._cuda_ipc import Driver
from logprobd._local_lease import Lease, LocalUnavailable

# Spans are page-aligned, so that no two share a cache line. Devices copy whole pages fastest.
_PAGE = mmap.PAGESIZE

# Seconds for which the pool does not ask again after the server has refused more memory.
_REFUSED_SECONDS = 1.0


class Region:
    """A piece of shared memory and its free ranges. The pool's lock protects it."""

    def __init__(self, region_id: bytes, memory: mmap.mmap, *, is_kept: bool) -> None:
        self.id = region_id
        self.memory = memory
        """It is never closed explicitly, and is unmapped when no array refers to it any more."""
        self.size = len(memory)
        self.is_kept = is_kept
        """Whether the pool keeps the region when all of it is free."""
        self.bytes = np.frombuffer(memory, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self._may_pin = True
        self._pinned: tuple[Driver, int] | None = None  # the driver and the process id
        self._free = [(0, self.size)]  # offset and size of each gap, sorted; no two are adjacent

    def __del__(self) -> None:
        # A forked child may not call CUDA.
        if self._pinned is not None and self._pinned[1] == os.getpid():
            with contextlib.suppress(Exception):  # the interpreter or CUDA may be shutting down
                self._pinned[0].unpin(self.address)

    def pin(self, driver: Driver) -> None:
        """Page-locks the region once, so that devices copy into it several times faster."""
        if self._pinned is None and self._may_pin:
            self._may_pin = False
            if driver.pin(self.address, self.size):
                self._pinned = (driver, os.getpid())

    @property
    def is_empty(self) -> bool:
        return self._free == [(0, self.size)]

    def take(self, size: int) -> int | None:
        """Allocates `size` bytes. Returns their offset, or None if no gap is large enough.

        Takes the first gap that fits, so that the same memory is reused and stays in cache.
        """
        for index, (offset, gap) in enumerate(self._free):
            if gap >= size:
                rest = [(offset + size, gap - size)] if gap > size else []
                self._free[index : index + 1] = rest
                return offset
        return None

    def give_back(self, offset: int, size: int) -> None:
        """Frees bytes that `take` has returned, and merges adjacent gaps."""
        index = next(
            (i for i, (begin, _) in enumerate(self._free) if begin > offset), len(self._free)
        )
        end = offset + size
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            index -= 1
            offset = self._free.pop(index)[0]
        self._free.insert(index, (offset, end - offset))


class Span:
    """An allocated range of a region."""

    def __init__(self, region: Region, offset: int, size: int, pool: RegionPool) -> None:
        self.region = region
        self.offset = offset
        self.size = size
        self._pool = pool

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        return self.region.bytes[self.offset : self.offset + self.size]

    def free(self) -> None:
        self._pool.free(self)


class RegionPool:
    """Allocates spans from the regions of one lease, and creates regions on demand. Thread-safe.

    Args:
        region_bytes: size of a region for requests. A larger span gets its own region, which is
            returned to the server once it is free; other regions live as long as the lease.
    """

    def __init__(self, lease: Lease, region_bytes: int) -> None:
        self._lease = lease
        self._region_bytes = max(_PAGE, min(region_bytes, lease.region_bytes_max or region_bytes))
        self._regions: list[Region] = []
        self._lock = threading.Lock()
        self._refused: tuple[float, LocalUnavailable] | None = None
        # Spans of garbage-collected arrays. Collection may run while the lock is held, so spans
        # are queued here and freed later.
        self._collected: deque[Span] = deque()

    def allocate(self, size: int) -> Span:
        """Allocates `size` bytes. Raises LocalUnavailable if that exceeds the server's limits."""
        rounded = -(-max(size, 1) // _PAGE) * _PAGE
        with self._lock:
            while self._collected:
                self._give_back(self._collected.popleft())
            for region in self._regions:
                offset = region.take(rounded)
                if offset is not None:
                    return Span(region, offset, size, self)
            region = self._grow(rounded)
            offset = region.take(rounded)
            assert offset is not None
            return Span(region, offset, size, self)

    def free(self, span: Span) -> None:
        with self._lock:
            self._give_back(span)

    def prepare(self) -> None:
        """Creates the first region, so that the first request does not wait for it."""
        self.allocate(1).free()

    def array(self, size: int) -> npt.NDArray[np.uint8]:
        """Returns an array of `size` bytes that is freed when no array refers to it any more."""
        span = self.allocate(size)
        owner = (ctypes.c_ubyte * size).from_buffer(span.region.memory, span.offset)
        pool = weakref.ref(self)

        def collected() -> None:
            if (alive := pool()) is not None:
                alive._collected.append(span)

        weakref.finalize(owner, collected).atexit = False
        memory: npt.NDArray[np.uint8] = np.ctypeslib.as_array(owner)
        return memory

    def find(self, address: int, size: int) -> tuple[Region, int] | None:
        """Returns the region that holds the bytes at `address` and their offset, or None."""
        for region in list(self._regions):
            offset = address - region.address
            if 0 <= offset <= region.size - size:
                return region, offset
        return None

    def _grow(self, size: int) -> Region:
        lease = self._lease
        if self._refused is not None and time.monotonic() < self._refused[0]:
            raise self._refused[1]
        target = max(size, self._region_bytes)
        held = sum(region.size for region in self._regions)
        if target > lease.lease_bytes_max - held:
            target = size  # the rest of the lease may suffice for this span alone
        if (
            target > lease.region_bytes_max
            or target > lease.lease_bytes_max - held
            or len(self._regions) >= lease.regions_max
        ):
            raise LocalUnavailable(
                f"{size} more bytes exceed the server's limits on shared memory: "
                f"{lease.region_bytes_max} bytes per region, {lease.lease_bytes_max} bytes and "
                f"{lease.regions_max} regions per client; this client uses {held} bytes",
                "RESOURCE_EXHAUSTED",
            )
        try:
            region_id, memory = lease.create_region(target)
        except LocalUnavailable as error:
            self._refused = (time.monotonic() + _REFUSED_SECONDS, error)
            raise
        region = Region(region_id, memory, is_kept=target <= self._region_bytes)
        self._regions.append(region)
        return region

    def _give_back(self, span: Span) -> None:
        region = span.region
        region.give_back(span.offset, -(-max(span.size, 1) // _PAGE) * _PAGE)
        if region.is_empty and not region.is_kept:
            self._regions.remove(region)
            # A failure means that the lease has ended, which also ends the region.
            with contextlib.suppress(LocalUnavailable):
                self._lease.close_region(region.id)
