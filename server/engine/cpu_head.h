#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cpu/row_scorer.h"
#include "server/base/head_info.h"
#include "server/engine/layout.h"
#include "server/engine/load_meter.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// Zeroed, page-aligned host memory. It uses huge pages where the system provides them, because
/// every batch reads the whole weight.
class HostMemory {
 public:
  /// Returns RESOURCE_EXHAUSTED if the system does not provide `size_bytes`.
  static absl::StatusOr<HostMemory> Allocate(int64_t size_bytes);

  HostMemory() = default;
  ~HostMemory();
  HostMemory(HostMemory&& other) noexcept { *this = std::move(other); }
  HostMemory& operator=(HostMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

/// A shard of a head in host memory, laid out for the CPU kernels.
class CpuHead {
 public:
  /// Reads the valid rows of `tiles` on up to `num_threads` threads and reports each tile to
  /// `meter`. It uses less than 64 MiB of memory in addition to the shard. Errors are those of
  /// HeadWeights::ReadRows, and RESOURCE_EXHAUSTED.
  static absl::StatusOr<CpuHead> Load(const HeadWeights& weights, const TileRange& tiles,
                                      int32_t num_threads, LoadMeter& meter);

  /// Returns the head in the form that the kernels take. It is valid as long as this object lives
  /// and is not moved from.
  kernels::CpuHead view() const;

  /// Returns the same structure without weight and bias, from which sizes can be computed.
  static kernels::CpuHead Describe(const HeadInfo& info, const TileRange& tiles);

  /// Returns the size of a shard's weight and bias in bytes.
  static int64_t WeightBytes(const HeadInfo& info, const TileRange& tiles);

 private:
  CpuHead() = default;

  HeadInfo info_;
  TileRange tiles_;
  HostMemory weight_;
  std::vector<float> bias_;
};

}  // namespace logprobd
