#include "server/engine/cuda_memory.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/engine/cuda_status.h"

namespace logprobd {
namespace {

absl::Status OutOfMemory(int64_t bytes, absl::string_view place, absl::string_view what) {
  (void)cudaGetLastError();  // not sticky; the next launch must not see it
  return absl::ResourceExhaustedError(
      absl::StrCat("not enough ", place, " memory for ", what, ": ", bytes >> 20, " MiB"));
}

}  // namespace

namespace internal {

void DeviceFree::operator()(std::byte* memory) const {
  // cudaFree would wait for all that the device does, and every launch of the process behind it;
  // this waits for the default stream alone, which is idle.
  cudaPointerAttributes attributes = {};
  int current = 0;
  if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess ||
      cudaGetDevice(&current) != cudaSuccess) {
    (void)cudaGetLastError();
    return;  // a context that a fault has ended
  }
  // Choosing a device makes a context there: not where none is needed.
  if (current != attributes.device) (void)cudaSetDevice(attributes.device);
  if (cudaFreeAsync(memory, cudaStreamLegacy) == cudaSuccess) {
    (void)cudaStreamSynchronize(cudaStreamLegacy);
  } else {
    (void)cudaGetLastError();
    (void)cudaFree(memory);  // a driver without memory pools
  }
  if (current != attributes.device) (void)cudaSetDevice(current);
}

}  // namespace internal

absl::StatusOr<DeviceBuffer> AllocateDevice(int64_t bytes, absl::string_view what) {
  if (bytes == 0) return DeviceBuffer();
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(bytes));
  if (error == cudaErrorMemoryAllocation) return OutOfMemory(bytes, "GPU", what);
  LOGPROBD_RETURN_IF_CUDA_ERROR(error);
  DeviceBuffer buffer(static_cast<std::byte*>(memory));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemset(memory, 0, static_cast<size_t>(bytes)));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(cudaStreamLegacy));
  return buffer;
}

absl::StatusOr<PinnedBuffer> AllocatePinned(int64_t bytes, absl::string_view what) {
  if (bytes == 0) return PinnedBuffer();
  void* memory = nullptr;
  const cudaError_t error =
      cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation) return OutOfMemory(bytes, "page-locked host", what);
  LOGPROBD_RETURN_IF_CUDA_ERROR(error);
  PinnedBuffer buffer(static_cast<std::byte*>(memory));
  std::memset(memory, 0, static_cast<size_t>(bytes));
  return buffer;
}

absl::StatusOr<CudaStream> CreateStream() {
  cudaStream_t stream = nullptr;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return CudaStream(stream);
}

absl::StatusOr<CudaEvent> CreateEvent() {
  cudaEvent_t event = nullptr;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&event, cudaEventBlockingSync));
  return CudaEvent(event);
}

}  // namespace logprobd
