#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// Owners of CUDA memory, streams and events, and the conversion of CUDA errors into Status.

namespace logprobd {

/// Converts an error of the CUDA runtime or of cuBLASLt: to RESOURCE_EXHAUSTED if memory ran out,
/// otherwise to INTERNAL. The message names the call, the error and the source line.
absl::Status CudaStatus(cudaError_t error, absl::string_view call, absl::string_view file,
                        int line);
absl::Status CudaStatus(cublasStatus_t error, absl::string_view call, absl::string_view file,
                        int line);

namespace internal {

constexpr bool IsCudaSuccess(cudaError_t error) { return error == cudaSuccess; }
constexpr bool IsCudaSuccess(cublasStatus_t error) { return error == CUBLAS_STATUS_SUCCESS; }

struct DeviceFree {
  void operator()(std::byte* memory) const;
};
struct PinnedFree {
  void operator()(std::byte* memory) const { (void)cudaFreeHost(memory); }
};
struct StreamDestroy {
  void operator()(cudaStream_t stream) const { (void)cudaStreamDestroy(stream); }
};
struct EventDestroy {
  void operator()(cudaEvent_t event) const { (void)cudaEventDestroy(event); }
};

}  // namespace internal

/// Returns from the function (Status or StatusOr) when a CUDA runtime or cuBLASLt call fails.
#define LOGPROBD_RETURN_IF_CUDA_ERROR(call)                                 \
  do {                                                                      \
    const auto cuda_error = (call);                                         \
    if (!::logprobd::internal::IsCudaSuccess(cuda_error)) {                 \
      return ::logprobd::CudaStatus(cuda_error, #call, __FILE__, __LINE__); \
    }                                                                       \
  } while (false)

/// Memory of the device that is current at allocation, 256-byte aligned. Kernels and copies that
/// use it must have ended before it is destroyed.
using DeviceBuffer = std::unique_ptr<std::byte[], internal::DeviceFree>;

/// Page-locked host memory that every device may copy from and to.
using PinnedBuffer = std::unique_ptr<std::byte[], internal::PinnedFree>;

using CudaStream = std::unique_ptr<CUstream_st, internal::StreamDestroy>;
using CudaEvent = std::unique_ptr<CUevent_st, internal::EventDestroy>;

/// Allocates zeroed memory, or returns a null buffer for zero bytes. `what` names the memory in the
/// RESOURCE_EXHAUSTED message.
absl::StatusOr<DeviceBuffer> AllocateDevice(int64_t bytes, absl::string_view what);
absl::StatusOr<PinnedBuffer> AllocatePinned(int64_t bytes, absl::string_view what);

/// Creates a stream that does not wait for the default stream.
absl::StatusOr<CudaStream> CreateStream();

/// Creates an event with timing. A thread that waits for it sleeps.
absl::StatusOr<CudaEvent> CreateEvent();

/// While an object of this class exists, this thread prefers the NUMA node closest to GPU `gpu` for
/// its allocations. Has no effect if the system has no NUMA nodes, refuses the call, or already has
/// a policy.
class PreferNodeOfGpu {
 public:
  explicit PreferNodeOfGpu(int32_t gpu);
  ~PreferNodeOfGpu();
  PreferNodeOfGpu(const PreferNodeOfGpu&) = delete;
  PreferNodeOfGpu& operator=(const PreferNodeOfGpu&) = delete;

 private:
  bool is_set_ = false;
};

}  // namespace logprobd
