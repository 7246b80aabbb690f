"""FakeServer's control socket: leases, shared memory, and the slices that requests refer to."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from logprobd import _wire
from logprobd._fake_scoring import Refusal
from logprobd._local_lease import boot_id

DeviceReader = Callable[[bytes, bytes, int, int], bytes]
"""Returns the bytes at (device_uuid, handle, offset, size) of a test's simulated GPU memory."""


@dataclass
class FakeLimits:
    """Limits of one lease."""

    region_bytes_max: int = 256 << 20
    lease_bytes_max: int = 1 << 30
    lease_regions_max: int = 16


@dataclass(eq=False)
class _FakeLease:
    connection: socket.socket
    id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    client_id: str | None = None
    """None until the client has sent Hello."""
    regions: dict[bytes, mmap.mmap] = field(default_factory=dict)


class FakeControl:
    """A control socket, which listens between `start` and `stop`."""

    def __init__(
        self, limits: FakeLimits, *, shared_memory: bool, device_reader: DeviceReader | None
    ) -> None:
        self.limits = limits
        self.shared_memory = shared_memory
        self.device_reader = device_reader
        self._folder = tempfile.mkdtemp(prefix="logprobd-fake-")
        self.path = os.path.join(self._folder, "control.sock")
        self._leases: list[_FakeLease] = []
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None

    @property
    def clients(self) -> list[str]:
        """The client_id of each lease."""
        with self._lock:
            return [lease.client_id for lease in self._leases if lease.client_id is not None]

    @property
    def num_regions(self) -> int:
        with self._lock:
            return sum(len(lease.regions) for lease in self._leases)

    def access(self) -> _wire.LocalAccess:
        return _wire.LocalAccess(
            boot_id=boot_id(),
            control_path=self.path,
            shared_memory=self.shared_memory,
            cuda_ipc=self.device_reader is not None,
        )

    def start(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)  # wakes accept, which close does not
            listener.close()
            os.unlink(self.path)
            os.rmdir(self._folder)
        self.drop_leases()

    def drop_leases(self) -> None:
        """Ends every lease, as a restart of the server does."""
        with self._lock:
            leases, self._leases = self._leases, []
        for lease in leases:
            with contextlib.suppress(OSError):  # the client may have disconnected just now
                lease.connection.shutdown(socket.SHUT_RDWR)

    def read(self, request: _wire.ScoreRequest) -> _wire.Buffer:
        """Returns the hidden states of a request from wherever they are stored. Raises Refusal."""
        if request.shared_memory is not None:
            return self._read_region(request.shared_memory)
        if request.cuda_ipc is not None:
            return self._read_device(request.cuda_ipc)
        return request.hidden

    def _read_region(self, part: _wire.SharedMemorySlice) -> bytes:
        with self._lock:
            for lease in self._leases:
                memory = lease.regions.get(bytes(part.region))
                if memory is not None:
                    break
            else:
                raise Refusal("NOT_FOUND", "shared_memory: no such region")
        end = part.offset + part.bytes
        if part.offset % 64 != 0 or end > len(memory):
            raise Refusal(
                "INVALID_ARGUMENT",
                f"shared_memory: bytes {part.offset} to {end} of a region of {len(memory)}",
            )
        return memory[part.offset : end]

    def _read_device(self, part: _wire.CudaIpcSlice) -> bytes:
        with self._lock:
            if all(lease.id != bytes(part.lease) for lease in self._leases):
                raise Refusal("NOT_FOUND", "cuda_ipc: no such lease")
        if self.device_reader is None or part.offset % 16 != 0:
            raise Refusal(
                "FAILED_PRECONDITION",
                f"cuda_ipc: offset {part.offset} is not a multiple of 16, or CUDA IPC is off",
            )
        return self.device_reader(
            bytes(part.device_uuid), bytes(part.handle), part.offset, part.bytes
        )

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # stopped
            lease = _FakeLease(connection)
            with self._lock:
                self._leases.append(lease)
            threading.Thread(target=self._serve, args=(lease,), daemon=True).start()

    def _serve(self, lease: _FakeLease) -> None:
        with lease.connection:
            while True:
                try:
                    data = lease.connection.recv(65536)
                except OSError:
                    data = b""
                if not data:
                    break
                fds: list[int] = []
                try:
                    reply = self._answer(lease, _wire.decode(_wire.LocalRequest, data), fds)
                except Refusal as refusal:
                    number: Any = grpc.StatusCode[refusal.code].value[0]
                    reply = _wire.LocalReply(status_code=number, status_message=refusal.message)
                socket.send_fds(lease.connection, [_wire.encode(reply)], fds)
                for fd in fds:
                    os.close(fd)
        with self._lock:
            if lease in self._leases:
                self._leases.remove(lease)

    def _answer(
        self, lease: _FakeLease, request: _wire.LocalRequest, fds: list[int]
    ) -> _wire.LocalReply:
        if request.hello is not None:
            lease.client_id = request.hello.client_id
            return _wire.LocalReply(
                welcome=_wire.Welcome(
                    lease=lease.id,
                    shared_memory=self.shared_memory,
                    cuda_ipc=self.device_reader is not None,
                    **vars(self.limits),
                )
            )
        if lease.client_id is None:
            raise Refusal("FAILED_PRECONDITION", "send Hello first")
        if request.create_region is not None:
            return _wire.LocalReply(region=self._create(lease, request.create_region.bytes, fds))
        if request.close_region is not None:
            with self._lock:
                if lease.regions.pop(bytes(request.close_region.id), None) is None:
                    raise Refusal("NOT_FOUND", "no such region of this lease")
            return _wire.LocalReply()
        raise Refusal("INVALID_ARGUMENT", "the message is empty")

    def _create(self, lease: _FakeLease, size: int, fds: list[int]) -> _wire.Region:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        limits = self.limits
        with self._lock:
            held = sum(len(memory) for memory in lease.regions.values())
            if (
                not 0 < size <= limits.region_bytes_max
                or held + size > limits.lease_bytes_max
                or len(lease.regions) >= limits.lease_regions_max
            ):
                raise Refusal("RESOURCE_EXHAUSTED", f"{size} bytes are above the limits")
            fd = os.memfd_create("logprobd-fake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            fds.append(fd)
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            region = secrets.token_bytes(16)
            lease.regions[region] = mmap.mmap(fd, size)
        return _wire.Region(id=region, bytes=size)
