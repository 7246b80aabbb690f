"""Makes CUDA IPC handles of a torch tensor's memory for a server on the same host.

The module uses the libcuda that torch has loaded. All calls to torch and CUDA are methods of
`Driver`, which tests replace.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from dataclasses import dataclass
from typing import Any, Protocol

HANDLE_BYTES = 64
UUID_BYTES = 16


class NotShareable(Exception):
    """Raised if another process cannot open this memory. The message says why."""


@dataclass(frozen=True)
class DeviceMemory:
    """The location of a tensor's bytes."""

    device_uuid: bytes
    """16 bytes."""
    handle: bytes
    """cudaIpcMemHandle_t of the whole allocation, 64 bytes."""
    offset: int
    """Bytes from the start of the allocation to the tensor's first byte."""


class Driver(Protocol):
    """The CUDA operations that the client needs. Thread-safe."""

    def wait(self, tensor: Any) -> None:
        """Returns when the work on the current stream of the tensor's device is complete."""

    def share(self, tensor: Any) -> DeviceMemory:
        """Returns the location of the tensor's memory, with which another process can open it.

        Raises NotShareable.
        """

    def pin(self, address: int, size: int) -> bool:
        """Page-locks host memory, so that device copies are fast. Returns False if it fails."""

    def unpin(self, address: int) -> None:
        """Reverses `pin`."""


class CudaDriver:
    """Driver over libcuda. Raises NotShareable if libcuda is missing, for example with ROCm."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NotShareable(f"libcuda.so.1 cannot be loaded: {error}") from error
        self._contexts: dict[int, ctypes.c_void_p] = {}  # primary contexts, never released
        self._uuids: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def wait(self, tensor: Any) -> None:
        torch = sys.modules["torch"]
        stream = torch.cuda.current_stream(tensor.device)
        # This queries the stream instead of recording an event, because an event would make the
        # GPU switch from the server's process to this one in the middle of a batch.
        if not stream.query():
            stream.synchronize()

    def share(self, tensor: Any) -> DeviceMemory:
        device = int(tensor.device.index)
        address = int(tensor.data_ptr())
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        handle = (ctypes.c_ubyte * HANDLE_BYTES)()
        with self._lock:
            uuid, context = self._uuid(device), self._context(device)
        self._check("cuCtxPushCurrent_v2", context)
        try:
            self._check(
                "cuMemGetAddressRange_v2",
                ctypes.byref(base),
                ctypes.byref(size),
                ctypes.c_uint64(address),
            )
            # This fails for memory of expandable segments and of cudaMallocAsync.
            self._check("cuIpcGetMemHandle", ctypes.byref(handle), base)
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        return DeviceMemory(uuid, bytes(handle), address - base.value)

    def pin(self, address: int, size: int) -> bool:
        portable = 1  # cudaHostRegisterPortable: pinned for all devices
        return int(_cudart().cudaHostRegister(address, size, portable)) == 0

    def unpin(self, address: int) -> None:
        _cudart().cudaHostUnregister(address)

    def _uuid(self, device: int) -> bytes:
        if device not in self._uuids:
            uuid = (ctypes.c_ubyte * UUID_BYTES)()
            self._check("cuDeviceGetUuid_v2", ctypes.byref(uuid), self._ordinal(device))
            self._uuids[device] = bytes(uuid)
        return self._uuids[device]

    def _context(self, device: int) -> ctypes.c_void_p:
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._ordinal(device))
            self._contexts[device] = context
        return self._contexts[device]

    def _ordinal(self, device: int) -> ctypes.c_int:
        ordinal = ctypes.c_int()
        self._check("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(device))
        return ordinal

    def _check(self, name: str, *arguments: Any) -> None:
        try:
            status = getattr(self._cuda, name)(*arguments)
        except AttributeError:
            raise NotShareable(f"libcuda has no {name}") from None
        if status != 0:
            raise NotShareable(f"{name}: {self._error_name(status)}")

    def _error_name(self, status: int) -> str:
        name = ctypes.c_char_p()
        if self._cuda.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name)) != 0 or not name:
            return f"error {status}"
        return (name.value or b"").decode()


def _cudart() -> Any:
    return sys.modules["torch"].cuda.cudart()
