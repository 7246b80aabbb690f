#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/score_request.h"

namespace logprobd {

/// Page-locks host memory so that GPUs can read it in place. Thread-safe.
class HostPinning {
 public:
  virtual ~HostPinning() = default;

  /// Page-locks `memory`, which must stay mapped until Unpin. Takes about 0.7 s for 1 GiB.
  /// RESOURCE_EXHAUSTED when the system refuses.
  virtual absl::Status Pin(absl::Span<std::byte> memory) = 0;
  virtual void Unpin(absl::Span<std::byte> memory) = 0;
  /// Whether Pin page-locks anything; HiddenPayload::is_pinned has this value.
  virtual bool pins() const = 0;
};

/// Does nothing, for a server without GPUs.
class NoPinning final : public HostPinning {
 public:
  static NoPinning& Shared() {
    static NoPinning shared;
    return shared;
  }
  absl::Status Pin(absl::Span<std::byte> /*memory*/) override { return absl::OkStatus(); }
  void Unpin(absl::Span<std::byte> /*memory*/) override {}
  bool pins() const override { return false; }
};

/// Maps memory of this host's GPUs that belongs to other processes. Thread-safe.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  /// Returns the slice as a payload whose owner keeps the mapping. A mapping stays open for a while
  /// after its last use. No handle can damage the GPU's context. Errors:
  ///   INVALID_ARGUMENT     the handle names no existing memory, or the slice exceeds the
  ///   allocation FAILED_PRECONDITION  the server neither uses nor reaches the GPU, the memory is
  ///   this
  ///                        process's own, or the host does not share GPU memory between processes
  ///   RESOURCE_EXHAUSTED   there are too many mappings
  virtual absl::StatusOr<HiddenPayload> Open(const DeviceSlice& slice) = 0;

  /// Number of open mappings.
  virtual int64_t num_mappings() const = 0;
};

}  // namespace logprobd
