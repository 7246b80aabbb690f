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

  /// Page-locks `memory`, which must stay mapped until Unpin. This takes about 0.7 s for 1 GiB.
  /// Returns RESOURCE_EXHAUSTED if the system refuses.
  virtual absl::Status Pin(absl::Span<std::byte> memory) = 0;
  virtual void Unpin(absl::Span<std::byte> memory) = 0;
  /// Returns whether Pin page-locks anything. HiddenPayload::is_pinned has this value.
  virtual bool pins() const = 0;
};

/// Page-locks nothing, for a server without GPUs.
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

  /// Returns the slice as a payload whose owner keeps the mapping open. A mapping stays open for a
  /// while after its last use. No handle can damage the GPU's context. Returns these errors:
  ///   - INVALID_ARGUMENT: the handle refers to no existing memory, or the slice exceeds the
  ///     allocation.
  ///   - FAILED_PRECONDITION: the server neither uses nor can access the GPU, the memory belongs to
  ///     this process, or the host does not share GPU memory between processes.
  ///   - RESOURCE_EXHAUSTED: there are too many mappings.
  virtual absl::StatusOr<HiddenPayload> Open(const DeviceSlice& slice) = 0;

  /// Copies bytes [offset, offset + out.size()) of an opened slice to host memory. Returns INTERNAL
  /// if the copy fails.
  virtual absl::Status CopyToHost(const HiddenPayload& slice, int64_t offset,
                                  absl::Span<std::byte> out) = 0;

  /// Returns the number of open mappings.
  virtual int64_t num_mappings() const = 0;
};

}  // namespace logprobd
