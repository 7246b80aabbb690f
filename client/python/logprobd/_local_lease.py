"""A client of the control socket of a server on the same host (proto/logprobd/v1/local.proto).

The connection is the lease: when it closes, the server reclaims the regions that it shared.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import threading

from logprobd import _wire
from logprobd.errors import code_name

BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"

# The server may page-lock a new region, which takes about 0.7 s per GiB.
_REPLY_SECONDS = 10.0
_PACKET_BYTES_MAX = 65536


class LocalUnavailable(Exception):
    """Shared memory is not available: the control socket cannot be used, or the server refuses."""

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code = code
        """The gRPC status name if the server refused; "" if it was not reached."""


def boot_id() -> str:
    """Returns the kernel's boot id, which differs between hosts and between boots; "" if none."""
    try:
        with open(BOOT_ID_PATH, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


class Lease:
    """A connection to the control socket. Thread-safe.

    Raises LocalUnavailable if the socket cannot be used or the server refuses.
    """

    def __init__(self, access: _wire.LocalAccess, client_id: str = "") -> None:
        if not access.boot_id or access.boot_id != boot_id():
            raise LocalUnavailable("the server runs on another host")
        if not access.control_path:
            raise LocalUnavailable("the server has no control socket")
        self._lock = threading.Lock()
        self._socket = _connect(access.control_path)
        self._hang_up = select.poll()
        # The server sends only replies. If the socket is readable between requests, the server has
        # closed it.
        self._hang_up.register(self._socket, select.POLLIN | select.POLLHUP)
        try:
            reply = self._ask(_wire.LocalRequest(hello=_wire.Hello(client_id)))
            if reply.welcome is None:
                raise LocalUnavailable("the control socket answered without a welcome")
        except BaseException:
            self._socket.close()
            raise
        welcome = reply.welcome
        self.id = bytes(welcome.lease)
        """16 bytes."""
        self.shared_memory = welcome.shared_memory
        self.cuda_ipc = welcome.cuda_ipc
        self.region_bytes_max = welcome.region_bytes_max
        self.lease_bytes_max = welcome.lease_bytes_max
        self.regions_max = welcome.lease_regions_max

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self._socket.close()

    @property
    def is_alive(self) -> bool:
        """False once the server has closed the connection, or after close."""
        with self._lock:
            return not self._has_ended

    @property
    def _has_ended(self) -> bool:
        return self._socket.fileno() < 0 or bool(self._hang_up.poll(0))

    def create_region(self, size: int) -> tuple[bytes, mmap.mmap]:
        """Creates a region of at least `size` bytes. Returns its id and its mapped memory."""
        request = _wire.LocalRequest(create_region=_wire.CreateRegion(size))
        reply, fds = self._exchange(request)
        try:
            if reply.region is None or len(fds) != 1:
                raise LocalUnavailable("the control socket answered without a region")
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            memory = mmap.mmap(fds[0], reply.region.bytes, flags)
        except (OSError, ValueError) as error:
            raise LocalUnavailable(f"the region cannot be mapped: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)
        return bytes(reply.region.id), memory

    def close_region(self, region: bytes) -> None:
        """Makes the server drop a region."""
        self._ask(_wire.LocalRequest(close_region=_wire.CloseRegion(region)))

    def close(self) -> None:
        """Ends the lease. In a forked child it closes only the child's descriptor."""
        self._socket.close()

    def _ask(self, request: _wire.LocalRequest) -> _wire.LocalReply:
        """Sends a request. Returns its reply, and closes descriptors that nobody asked for."""
        reply, fds = self._exchange(request)
        for fd in fds:
            os.close(fd)
        return reply

    def _exchange(self, request: _wire.LocalRequest) -> tuple[_wire.LocalReply, list[int]]:
        """Sends a request. Returns its reply and the file descriptors passed with it."""
        with self._lock:
            try:
                self._socket.send(_wire.encode(request))
                data, fds, _, _ = socket.recv_fds(
                    self._socket, _PACKET_BYTES_MAX, 1, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
                )
            except OSError as error:
                self._socket.close()  # a late reply would be read as the next request's reply
                raise LocalUnavailable(f"the control socket failed: {error}") from error
        try:
            # An empty packet is a reply without fields, unless the connection has ended.
            if not data and self._has_ended:
                raise LocalUnavailable("the server closed the control socket")
            reply = _wire.decode(_wire.LocalReply, data)
            if reply.status_code != 0:
                raise LocalUnavailable(reply.status_message, code_name(reply.status_code))
        except (LocalUnavailable, _wire.DecodeError) as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, _wire.DecodeError):
                raise LocalUnavailable(
                    f"the control socket's reply cannot be read: {error}"
                ) from error
            raise
        return reply, fds


def _connect(path: str) -> socket.socket:
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "SOCK_SEQPACKET"):
        raise LocalUnavailable("this platform has no Unix sockets of type SOCK_SEQPACKET")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_REPLY_SECONDS)
        connection.connect(path)
    except OSError as error:
        connection.close()
        advice = ""
        with contextlib.suppress(KeyError):
            advice = {
                FileNotFoundError: ": in a container, mount the folder of the server's socket",
                PermissionError: ": run the client as the server's user",
                ConnectionRefusedError: ": the server has ended",
            }[type(error)]
        raise LocalUnavailable(f"{path}: {error.strerror or error}{advice}") from error
    return connection
