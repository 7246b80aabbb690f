#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cpu/row_scorer.h"
#include "server/base/head_info.h"
#include "server/engine/host_memory.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// A head in host memory, laid out for the CPU kernels.
class CpuHead {
 public:
  /// Reads the valid rows of `weights` on `num_threads` threads; `progress` (may be empty) is told
  /// by one of them at a time. Memory beyond the head's own stays below 64 MiB. Errors are those of
  /// HeadWeights::ReadRows, and RESOURCE_EXHAUSTED.
  static absl::StatusOr<CpuHead> Load(
      const HeadWeights& weights, int32_t num_threads,
      const std::function<void(int64_t done_bytes, int64_t total_bytes)>& progress);

  /// What the kernels take; valid as long as this head lives and is not moved from.
  kernels::CpuHead view() const;

  /// The same, without memory: for sizes.
  static kernels::CpuHead Facts(const HeadInfo& info);

  static int64_t WeightBytes(const HeadInfo& info);

 private:
  CpuHead() = default;

  HeadInfo info_;
  HostMemory weight_;
  std::vector<float> bias_;
};

}  // namespace logprobd
