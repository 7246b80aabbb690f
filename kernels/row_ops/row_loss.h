#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/row_ops/row_values.h"

namespace logprobd::kernels {

/// One score of the rows, and what it counts.
struct WeightedScore {
  const float* scores = nullptr;  ///< [num_rows]
  RowValues weights;              ///< Absent: the score has no part.
};

inline constexpr int kRowScores = 4;

/// Inputs and outputs of LaunchRowLoss. Pointers are device memory and stay the caller's.
struct RowLossParams {
  int64_t num_rows = 0;  ///< 0 to 2^31 - 1
  WeightedScore scores[kRowScores];
  float* loss = nullptr;  ///< One: the sum of scores times weights.
};

/// Enqueues the sum on `stream`: in fp64, of the same bits for the same inputs. A score whose
/// weight is 0 has no part, though it be NaN. Returns without waiting.
///
/// Thread-safe. Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchRowLoss(const RowLossParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
