"""Memory shared with a server, in regions that are kept and cut into spans."""

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
from logprobd._local import Lease, LocalUnavailable

# Spans begin and end at pages: no two share a cache line, and devices copy whole pages fastest.
_PAGE = mmap.PAGESIZE

# After the server has refused more memory, this long nothing more is asked for.
_REFUSED_SECONDS = 1.0


class Region:
    """A piece of shared memory and what is free of it. Locked by its pool."""

    def __init__(self, region_id: bytes, memory: mmap.mmap, *, is_kept: bool) -> None:
        self.id = region_id
        self.memory = memory
        """Never closed by hand: it is unmapped once no array lies in it any more."""
        self.size = len(memory)
        self.is_kept = is_kept
        """Whether it stays when all of it is free."""
        self.bytes = np.frombuffer(memory, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self._may_pin = True
        self._pinned: tuple[Driver, int] | None = None  # by whom, in which process
        self._free = [(0, self.size)]  # offset and size of each gap, in order, never adjacent

    def __del__(self) -> None:
        # A forked child may not call CUDA.
        if self._pinned is not None and self._pinned[1] == os.getpid():
            with contextlib.suppress(Exception):  # the interpreter, or CUDA, may be ending
                self._pinned[0].unpin(self.address)

    def pin(self, driver: Driver) -> None:
        """Page-locks it, once: devices copy into it several times faster."""
        if self._pinned is None and self._may_pin:
            self._may_pin = False
            if driver.pin(self.address, self.size):
                self._pinned = (driver, os.getpid())

    @property
    def is_empty(self) -> bool:
        return self._free == [(0, self.size)]

    def take(self, size: int) -> int | None:
        """Offset of a free piece, the first that is large enough: the same memory is used again
        and again, and stays in cache."""
        for index, (offset, gap) in enumerate(self._free):
            if gap >= size:
                rest = [(offset + size, gap - size)] if gap > size else []
                self._free[index : index + 1] = rest
                return offset
        return None

    def give_back(self, offset: int, size: int) -> None:
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
    """A piece of a region."""

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
    """The regions of one lease: made as they are needed, kept while the lease lives.

    Args:
        region_bytes: size of a region for requests; larger wishes get one of their own, which is
            given back once it is free.

    Any thread may use it.
    """

    def __init__(self, lease: Lease, region_bytes: int) -> None:
        self._lease = lease
        self._region_bytes = max(_PAGE, min(region_bytes, lease.region_bytes_max or region_bytes))
        self._regions: list[Region] = []
        self._lock = threading.Lock()
        self._refused: tuple[float, LocalUnavailable] | None = None
        # Spans of arrays that were collected: that happens anywhere, under this lock too.
        self._collected: deque[Span] = deque()

    def allocate(self, size: int) -> Span:
        """`size` bytes. LocalUnavailable when the server's limits do not allow them."""
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
        """Makes the first region, so that the first request need not wait for it."""
        self.allocate(1).free()

    def array(self, size: int) -> npt.NDArray[np.uint8]:
        """Bytes that are free again once no array refers to them."""
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
        """The region that holds the bytes at `address`, and their offset there."""
        for region in list(self._regions):
            offset = address - region.address
            if 0 <= offset <= region.size - size:
                return region, offset
        return None

    def _grow(self, size: int) -> Region:
        lease = self._lease
        if self._refused is not None and time.monotonic() < self._refused[0]:
            raise self._refused[1]
        wanted = max(size, self._region_bytes)
        held = sum(region.size for region in self._regions)
        if wanted > lease.lease_bytes_max - held:
            wanted = size  # what is left of the lease may still do
        if (
            wanted > lease.region_bytes_max
            or wanted > lease.lease_bytes_max - held
            or len(self._regions) >= lease.regions_max
        ):
            raise LocalUnavailable(
                f"{size} bytes more are above the server's limits on shared memory: "
                f"{lease.region_bytes_max} a region, {lease.lease_bytes_max} and "
                f"{lease.regions_max} regions a client, {held} in use",
                "RESOURCE_EXHAUSTED",
            )
        try:
            region_id, memory = lease.create_region(wanted)
        except LocalUnavailable as error:
            self._refused = (time.monotonic() + _REFUSED_SECONDS, error)
            raise
        region = Region(region_id, memory, is_kept=wanted <= self._region_bytes)
        self._regions.append(region)
        return region

    def _give_back(self, span: Span) -> None:
        region = span.region
        region.give_back(span.offset, -(-max(span.size, 1) // _PAGE) * _PAGE)
        if region.is_empty and not region.is_kept:
            self._regions.remove(region)
            # Where that fails the lease has ended, and the region with it.
            with contextlib.suppress(LocalUnavailable):
                self._lease.close_region(region.id)
