#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/host_memory_size.h"
#include "server/base/local_memory.h"
#include "server/transport/file_descriptor.h"

namespace logprobd {

/// Memory that a client may map as well: a memfd that we made, so that nobody can take its pages
/// away while they are read. It is sealed against shrinking and growing, its pages are there from
/// the start, and it is pinned for GPUs.
class RegionMemory {
 public:
  /// `bytes` are rounded up to whole pages. Takes as long as zeroing and pinning do: 0.35 s for 512
  /// MiB. `pinning` must outlive the memory. RESOURCE_EXHAUSTED when the host does not give it, or
  /// when it would leave less than an eighth of `available_bytes`.
  /// (A memfd's pages have no limit of their own: the system would take them until nothing is
  /// left.)
  static absl::StatusOr<RegionMemory> Create(
      int64_t bytes, HostPinning& pinning,
      int64_t available_bytes = ReadHostMemorySize().available_bytes);

  RegionMemory(RegionMemory&& other) noexcept;
  RegionMemory& operator=(RegionMemory&& other) = delete;
  /// Unpins and unmaps: may block.
  ~RegionMemory();

  absl::Span<const std::byte> bytes() const { return mapped_; }
  bool is_pinned() const { return is_pinned_ && pinning_->pins(); }

  /// The memfd, to be passed on and closed; the memory stays mapped here without it. Once.
  FileDescriptor TakeFile() { return std::move(file_); }

  /// `bytes` > 0 in whole pages; saturates.
  static int64_t RoundUp(int64_t bytes);

 private:
  explicit RegionMemory(HostPinning& pinning) : pinning_(&pinning) {}

  FileDescriptor file_;
  absl::Span<std::byte> mapped_;
  HostPinning* pinning_;
  bool is_pinned_ = false;
};

}  // namespace logprobd
