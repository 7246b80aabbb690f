#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "kernels/chunked/chunk_plan.h"
#include "kernels/common/dtype.h"
#include "kernels/common/logit_transform.h"
#include "server/base/dtype.h"
#include "server/engine/cuda_memory.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// A head as it lies on a GPU, laid out as the ChunkPlan says.
struct CudaHead {
  DeviceBuffer weight;  ///< [num_tiles * 192, padded_hidden]; zero beyond vocabulary and hidden.
  DeviceBuffer bias;    ///< [num_tiles * 192] fp32, or null.
  kernels::LogitTransform transform;

  /// Whether logits are more than dot products.
  bool has_transform() const { return bias.get() != nullptr || !transform.IsIdentity(); }
};

/// Bytes of a CudaHead.
int64_t CudaHeadBytes(const kernels::ChunkPlan& plan, bool has_bias);

/// Reads the vocabulary's rows of `weights` to the current device through two page-locked buffers
/// of 8 MiB (one row each where that is more). `progress` may be empty. Errors are those of
/// HeadWeights::ReadRows, RESOURCE_EXHAUSTED for memory, INTERNAL for CUDA.
absl::StatusOr<CudaHead> LoadCudaHead(
    const HeadWeights& weights, const kernels::ChunkPlan& plan,
    const std::function<void(int64_t done_bytes, int64_t total_bytes)>& progress);

}  // namespace logprobd
