#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/score_request.h"

namespace logprobd {

/// Makes host memory readable by GPUs in place. Without a GPU nothing needs to be done (NoPinning).
/// Thread-safe.
class HostPinning {
 public:
  virtual ~HostPinning() = default;

  /// Page-locks memory that stays mapped until Unpin: about 0.7 s for 1 GiB. RESOURCE_EXHAUSTED
  /// when it cannot be had.
  virtual absl::Status Pin(absl::Span<std::byte> memory) = 0;
  virtual void Unpin(absl::Span<std::byte> memory) = 0;
  /// Whether Pin does anything: what HiddenPayload::is_pinned becomes.
  virtual bool pins() const = 0;
};

/// Of a server without GPUs.
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

/// Maps memory that other processes own on this host's GPUs. Thread-safe.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  /// The slice as a payload whose owner keeps the mapping. Mappings are kept for a while after
  /// their last use. Whatever the handle, the GPU's context stays good. Errors:
  ///   INVALID_ARGUMENT     no handle of living memory, or a slice beyond the allocation
  ///   FAILED_PRECONDITION  a GPU that this server neither uses nor reaches, this process's own
  ///                        memory, or a host that does not share GPU memory between processes
  ///   RESOURCE_EXHAUSTED   too many mappings
  virtual absl::StatusOr<HiddenPayload> Open(const DeviceSlice& slice) = 0;

  /// Mappings that are open.
  virtual int64_t num_mappings() const = 0;
};

}  // namespace logprobd
