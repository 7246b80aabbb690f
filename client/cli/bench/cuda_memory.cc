#include "client/cli/bench/cuda_memory.h"

#include <dlfcn.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace logprobd::client {
namespace {

// Copies of the types in cuda.h, so that the build does not need it.
using Result = int;
using DevicePointer = uint64_t;
constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;

}  // namespace

/// The driver's functions and the GPU's primary context, which is never released.
struct CudaMemory::Driver {
  Result (*init)(unsigned) = nullptr;
  Result (*device_get)(int*, int) = nullptr;
  Result (*device_get_uuid)(void*, int) = nullptr;
  Result (*primary_context_retain)(void**, int) = nullptr;
  Result (*context_set_current)(void*) = nullptr;
  Result (*context_synchronize)() = nullptr;
  Result (*memory_allocate)(DevicePointer*, size_t) = nullptr;
  Result (*memory_free)(DevicePointer) = nullptr;
  Result (*copy_from_host)(DevicePointer, const void*, size_t) = nullptr;
  Result (*copy_on_device)(DevicePointer, DevicePointer, size_t) = nullptr;
  Result (*ipc_get_handle)(void*, DevicePointer) = nullptr;
  Result (*error_name)(Result, const char**) = nullptr;

  void* context = nullptr;
  std::array<uint8_t, 16> uuid = {};

  template <typename Function>
  bool Find(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    return function != nullptr;
  }

  absl::Status FindAll(void* library, const std::string& path) {
    const bool found = Find(library, "cuInit", init) && Find(library, "cuDeviceGet", device_get) &&
                       Find(library, "cuDeviceGetUuid_v2", device_get_uuid) &&
                       Find(library, "cuDevicePrimaryCtxRetain", primary_context_retain) &&
                       Find(library, "cuCtxSetCurrent", context_set_current) &&
                       Find(library, "cuCtxSynchronize", context_synchronize) &&
                       Find(library, "cuMemAlloc_v2", memory_allocate) &&
                       Find(library, "cuMemFree_v2", memory_free) &&
                       Find(library, "cuMemcpyHtoD_v2", copy_from_host) &&
                       Find(library, "cuMemcpyDtoD_v2", copy_on_device) &&
                       Find(library, "cuIpcGetMemHandle", ipc_get_handle) &&
                       Find(library, "cuGetErrorName", error_name);
    if (found) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        path, " is not the library of an NVIDIA driver with CUDA 11.4 or newer: ", dlerror()));
  }

  absl::Status Check(Result result, absl::string_view call) const {
    if (result == kSuccess) return absl::OkStatus();
    const char* name = nullptr;
    error_name(result, &name);
    const std::string message =
        absl::StrCat(call, ": ", name == nullptr ? absl::StrCat("error ", result) : name);
    return result == kOutOfMemory ? absl::ResourceExhaustedError(message)
                                  : absl::FailedPreconditionError(message);
  }

  /// Makes the context current on the calling thread.
  absl::Status Enter() const { return Check(context_set_current(context), "cuCtxSetCurrent"); }

  absl::Status Start(int32_t ordinal) {
    absl::Status status = Check(init(0), "cuInit");
    int device = 0;
    if (status.ok()) status = Check(device_get(&device, ordinal), absl::StrCat("GPU ", ordinal));
    if (status.ok()) status = Check(device_get_uuid(uuid.data(), device), "cuDeviceGetUuid");
    if (status.ok()) {
      status = Check(primary_context_retain(&context, device), "cuDevicePrimaryCtxRetain");
    }
    return status;
  }
};

struct CudaBuffer::Allocation {
  std::shared_ptr<const CudaMemory::Driver> driver;
  DevicePointer address = 0;
  std::array<uint8_t, 64> handle = {};

  ~Allocation() {
    if (driver->Enter().ok()) driver->memory_free(address);
  }
};

DeviceRows CudaBuffer::Rows(int64_t offset, int64_t bytes) const {
  return {.device_uuid = allocation_->driver->uuid,
          .handle = allocation_->handle,
          .offset = offset,
          .bytes = bytes};
}

absl::Status CudaBuffer::Write(int64_t offset, absl::Span<const std::byte> from) {
  const CudaMemory::Driver& driver = *allocation_->driver;
  if (absl::Status status = driver.Enter(); !status.ok()) return status;
  const DevicePointer to = allocation_->address + static_cast<uint64_t>(offset);
  absl::Status status =
      driver.Check(driver.copy_from_host(to, from.data(), from.size()), "cuMemcpyHtoD");
  // A copy from pageable memory may return before it is finished.
  if (status.ok()) status = driver.Check(driver.context_synchronize(), "cuCtxSynchronize");
  return status;
}

absl::Status CudaBuffer::Copy(int64_t offset, const CudaBuffer& from, int64_t from_offset,
                              int64_t bytes) {
  const CudaMemory::Driver& driver = *allocation_->driver;
  if (absl::Status status = driver.Enter(); !status.ok()) return status;
  absl::Status status = driver.Check(
      driver.copy_on_device(allocation_->address + static_cast<uint64_t>(offset),
                            from.allocation_->address + static_cast<uint64_t>(from_offset),
                            static_cast<size_t>(bytes)),
      "cuMemcpyDtoD");
  if (status.ok()) status = driver.Check(driver.context_synchronize(), "cuCtxSynchronize");
  return status;
}

absl::StatusOr<CudaMemory> CudaMemory::Open(int32_t ordinal, const std::string& library) {
  // The library is never closed, since the driver does not support unloading.
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("this machine has no NVIDIA driver: ", dlerror()));
  }
  auto driver = std::make_shared<Driver>();
  absl::Status status = driver->FindAll(handle, library);
  if (status.ok()) status = driver->Start(ordinal);
  if (!status.ok()) return status;
  return CudaMemory(std::move(driver));
}

absl::StatusOr<CudaBuffer> CudaMemory::Allocate(int64_t bytes) {
  if (absl::Status status = driver_->Enter(); !status.ok()) return status;
  DevicePointer address = 0;
  absl::Status status =
      driver_->Check(driver_->memory_allocate(&address, static_cast<size_t>(bytes)),
                     absl::StrCat("cuMemAlloc of ", bytes, " bytes"));
  if (!status.ok()) return status;
  auto allocation = std::make_shared<CudaBuffer::Allocation>();
  allocation->driver = driver_;
  allocation->address = address;
  status = driver_->Check(driver_->ipc_get_handle(allocation->handle.data(), address),
                          "cuIpcGetMemHandle");
  if (!status.ok()) return status;
  return CudaBuffer(std::move(allocation));
}

}  // namespace logprobd::client
