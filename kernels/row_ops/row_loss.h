#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/row_ops/row_source.h"

namespace logprobd::kernels {

/// One kind of score of all rows, and each row's weight in the loss.
struct WeightedScore {
  const float* scores = nullptr;  ///< [num_rows]
  RowValues weights;              ///< [num_rows]; null values: the score is not part of the loss.
};

/// Largest number of kinds of scores in a loss.
inline constexpr int kRowScores = 4;

/// Inputs and outputs of LaunchRowLoss. Pointers point to device memory that the caller owns.
struct RowLossParams {
  int64_t num_rows = 0;  ///< 0 to 2^31 - 1.
  WeightedScore scores[kRowScores];
  float* loss = nullptr;  ///< One number: the sum of scores times weights.
};

/// Enqueues on `stream` the sum of weighted scores and returns without waiting. The sum is computed
/// in fp64, in an order that depends only on num_rows. A score whose weight is 0 is skipped, even
/// if it is NaN.
///
/// Thread-safe. Returns cudaErrorInvalidValue if a parameter is out of range, otherwise the error
/// of the launch.
[[nodiscard]] cudaError_t LaunchRowLoss(const RowLossParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
