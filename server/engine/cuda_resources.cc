#include "server/engine/cuda_resources.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

constexpr int kNodesMax = 64;

std::string Message(absl::string_view error, absl::string_view call, absl::string_view file,
                    int line) {
  const size_t folder = file.rfind('/');
  if (folder != absl::string_view::npos) file.remove_prefix(folder + 1);
  return absl::StrCat(error, " (", call, ", ", file, ":", line, ")");
}

absl::Status OutOfMemory(int64_t bytes, absl::string_view kind, absl::string_view what) {
  // The error is not sticky. Without this call, the next launch check would report it.
  (void)cudaGetLastError();
  return absl::ResourceExhaustedError(
      absl::StrCat("not enough ", kind, " memory for ", what, ": ", bytes >> 20, " MiB"));
}

}  // namespace

absl::Status CudaStatus(cudaError_t error, absl::string_view call, absl::string_view file,
                        int line) {
  const std::string text = absl::StrCat("CUDA error ", static_cast<int>(error), " ",
                                        cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  const std::string message = Message(text, call, file, line);
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(message)
                                            : absl::InternalError(message);
}

absl::Status CudaStatus(cublasStatus_t error, absl::string_view call, absl::string_view file,
                        int line) {
  const std::string text = absl::StrCat("cuBLASLt error ", cublasLtGetStatusName(error), ": ",
                                        cublasLtGetStatusString(error));
  const std::string message = Message(text, call, file, line);
  return error == CUBLAS_STATUS_ALLOC_FAILED ? absl::ResourceExhaustedError(message)
                                             : absl::InternalError(message);
}

namespace internal {

void DeviceFree::operator()(std::byte* memory) const {
  // cudaFree would wait for all work of the device and block every launch of the process meanwhile;
  // cudaFreeAsync waits only for the default stream, which is idle.
  cudaPointerAttributes attributes = {};
  int current = 0;
  if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess ||
      cudaGetDevice(&current) != cudaSuccess) {
    (void)cudaGetLastError();
    return;  // a fault has ended the context
  }
  // Setting a device creates a context there, so it is avoided where it is not needed.
  if (current != attributes.device) (void)cudaSetDevice(attributes.device);
  if (cudaFreeAsync(memory, cudaStreamLegacy) == cudaSuccess) {
    (void)cudaStreamSynchronize(cudaStreamLegacy);
  } else {
    (void)cudaGetLastError();
    (void)cudaFree(memory);  // the driver has no memory pools
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

PreferNodeOfGpu::PreferNodeOfGpu(int32_t gpu) {
  int node = -1;
  if (cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, gpu) != cudaSuccess) {
    (void)cudaGetLastError();
    return;
  }
  if (node < 0 || node >= kNodesMax) return;
  int policy = MPOL_DEFAULT;
  // A policy that the operator has chosen, for example with numactl, stays in force.
  if (syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) != 0 || policy != MPOL_DEFAULT) {
    return;
  }
  const uint64_t nodes = uint64_t{1} << node;
  // The system call reads one bit less than its count says.
  is_set_ = syscall(SYS_set_mempolicy, MPOL_PREFERRED, &nodes, kNodesMax + 1) == 0;
}

PreferNodeOfGpu::~PreferNodeOfGpu() {
  if (is_set_) (void)syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0);
}

}  // namespace logprobd
