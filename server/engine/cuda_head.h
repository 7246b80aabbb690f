#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/common/dtype.h"
#include "kernels/common/logit_transform.h"
#include "server/base/head_info.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/load_meter.h"
#include "server/engine/workspace_plan.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// A head, or a shard of one, in GPU memory. Its WorkspacePlan defines the layout.
struct CudaHead {
  DeviceBuffer
      weight;         ///< [num_tiles * 192, padded_hidden]; zero beyond vocab_size and hidden_size.
  DeviceBuffer bias;  ///< [tiles of the whole vocabulary * 192] in fp32, or null.
  kernels::LogitTransform transform;
};

/// Returns the bytes of weight and bias on the GPU.
int64_t CudaHeadBytes(const WorkspacePlan& plan, bool has_bias);

/// Reads the rows of the plan's tiles into the memory of the current device. A few threads read,
/// each through two page-locked buffers of 4 MiB (or of one row, if that is larger), and report
/// each read to `meter`. If the meter has a failure, reading stops, and the function returns that
/// failure. Otherwise it returns the errors of HeadWeights::ReadRows, RESOURCE_EXHAUSTED if memory
/// runs out, and INTERNAL for other CUDA errors.
absl::StatusOr<CudaHead> LoadCudaHead(const HeadWeights& weights, const WorkspacePlan& plan,
                                      LoadMeter& meter);

}  // namespace logprobd
