#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cpu/row_scorer.h"
#include "server/base/head_info.h"
#include "server/engine/host_memory.h"
#include "server/engine/load_meter.h"
#include "server/engine/vocab_partition.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// A shard of a head in host memory, laid out for the CPU kernels.
class CpuHead {
 public:
  /// Reads the valid rows of `tiles` on `num_threads` threads; `meter` is told of each tile. Memory
  /// beyond the shard's own stays below 64 MiB. Errors are those of HeadWeights::ReadRows, and
  /// RESOURCE_EXHAUSTED.
  static absl::StatusOr<CpuHead> Load(const HeadWeights& weights, const TileRange& tiles,
                                      int32_t num_threads, LoadMeter& meter);

  /// What the kernels take; valid as long as this head lives and is not moved from.
  kernels::CpuHead view() const;

  /// The same, without memory: for sizes.
  static kernels::CpuHead Facts(const HeadInfo& info, const TileRange& tiles);

  static int64_t WeightBytes(const HeadInfo& info, const TileRange& tiles);

 private:
  CpuHead() = default;

  HeadInfo info_;
  TileRange tiles_;
  HostMemory weight_;
  std::vector<float> bias_;
};

}  // namespace logprobd
