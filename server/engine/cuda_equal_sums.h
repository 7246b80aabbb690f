#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/head_info.h"
#include "server/engine/engines.h"
#include "server/engine/equal_sums.h"

// The check that a GPU computes a dot product with the same bits on every path. On Hopper wgmma,
// mma.sync and cuBLASLt all add the products of 16 elements to an fp32 sum, in steps along the
// hidden dimension; no document promises the order and the rounding within a step (DECISIONS 48).

namespace logprobd {

/// Computes the same synthetic products on the current device in every way that engines with a head
/// of this dtype and hidden size and with this choice of kernel use: by each block tile of the
/// fused kernel, the listed logits and the recomputed tiles of top-k where the fused kernel runs,
/// and by cuBLASLt in several shapes. The values spread over many powers of two and partly cancel,
/// so that another order or another rounding changes bits. Takes a few milliseconds and some MiB of
/// GPU memory, plus the time in which CUDA loads the kernels. Returns RESOURCE_EXHAUSTED if memory
/// runs out, and INTERNAL for other CUDA errors.
absl::StatusOr<std::vector<SumResults>> ComputeSums(Dtype head_dtype, int64_t hidden_size,
                                                    GpuKernel kernel);

/// Checks that the sums of GPU `gpu` are equal, unless the file in `options.state_dir` says that
/// they are for this GPU model, driver, libraries, version, dtype and hidden size; so with a folder
/// only the first GPU of a model is checked. If they differ, logs a warning that says what no
/// longer holds, and sets the GPU's metric. Unequal sums are not an error, nor are those of
/// ComputeSums, which are logged: returns INTERNAL only if the GPU does not answer.
absl::Status CheckEqualSums(const HeadInfo& head, const EngineOptions& options, int gpu);

}  // namespace logprobd
