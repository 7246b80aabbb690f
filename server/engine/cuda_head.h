#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/chunked/chunk_plan.h"
#include "kernels/common/dtype.h"
#include "kernels/common/logit_transform.h"
#include "server/base/head_info.h"
#include "server/engine/cuda_memory.h"
#include "server/engine/load_meter.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// A head or a shard of one as it lies on a GPU, laid out as the ChunkPlan says.
struct CudaHead {
  DeviceBuffer weight;  ///< [num_tiles * 192, padded_hidden]; zero beyond vocabulary and hidden.
  DeviceBuffer bias;    ///< [tiles of the whole vocabulary * 192] fp32, or null.
  kernels::LogitTransform transform;

  /// Whether logits are more than dot products.
  bool has_transform() const { return bias.get() != nullptr || !transform.IsIdentity(); }
};

/// Bytes of a CudaHead.
int64_t CudaHeadBytes(const kernels::ChunkPlan& plan, bool has_bias);

/// Reads the rows of the plan's tiles to the current device, on a few threads, each through two
/// page-locked buffers of 4 MiB (one row each where that is more). `meter` is told of each read.
/// Stops soon, with its failure, once the meter has one. Errors are those of HeadWeights::ReadRows,
/// RESOURCE_EXHAUSTED for memory, INTERNAL for CUDA.
absl::StatusOr<CudaHead> LoadCudaHead(const HeadWeights& weights, const kernels::ChunkPlan& plan,
                                      LoadMeter& meter);

}  // namespace logprobd
