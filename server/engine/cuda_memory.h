#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {
namespace internal {

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

/// Memory of the current device, 256-byte aligned. Nothing may use it any more when it is
/// destroyed.
using DeviceBuffer = std::unique_ptr<std::byte[], internal::DeviceFree>;

/// Page-locked host memory that every device may copy from and to.
using PinnedBuffer = std::unique_ptr<std::byte[], internal::PinnedFree>;

using CudaStream = std::unique_ptr<CUstream_st, internal::StreamDestroy>;
using CudaEvent = std::unique_ptr<CUevent_st, internal::EventDestroy>;

/// `what` names the memory in the RESOURCE_EXHAUSTED message. Zero bytes give a null buffer. The
/// content is zero.
absl::StatusOr<DeviceBuffer> AllocateDevice(int64_t bytes, absl::string_view what);
absl::StatusOr<PinnedBuffer> AllocatePinned(int64_t bytes, absl::string_view what);

/// A stream that does not wait for the default stream.
absl::StatusOr<CudaStream> CreateStream();

/// An event that takes the time and puts a waiting thread to sleep.
absl::StatusOr<CudaEvent> CreateEvent();

}  // namespace logprobd
