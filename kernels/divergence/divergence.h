#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/logit_transform.h"
#include "kernels/divergence/divergence_math.h"

namespace logprobd::kernels {

/// Dot products and head of one model. Pointers point to device memory that the caller owns.
struct DivergenceModel {
  const float* dots = nullptr;  ///< [num_rows, row_stride], 16-byte aligned.
  int64_t row_stride = 0;       ///< Elements, at least num_columns, a multiple of 4.
  const float* bias = nullptr;  ///< [num_columns]; null: none.
  LogitTransform transform;     ///< The scale must not be 0.
};

/// Rows of both models.
struct DivergenceRowsParams {
  int64_t num_rows = 0;     ///< 0 to 2^31 - 1; 0 does nothing.
  int64_t num_columns = 0;  ///< 1 to 2^31 - 1.
  DivergenceKind kind = DivergenceKind::kForwardKl;
  double beta = 0.5;  ///< In (0, 1). Used only by kJsd.
  DivergenceModel student;
  DivergenceModel teacher;
  const double* temperatures = nullptr;  ///< [num_rows], > 0
};

/// Enqueues on `stream` the statistics of every row, [num_rows], and returns without waiting. A
/// logit that is NaN or +inf, or a model whose logits are all -inf, makes values that depend on it
/// NaN. Thread-safe. Returns cudaErrorInvalidValue if a parameter is out of range, otherwise the
/// error of the launch.
[[nodiscard]] cudaError_t LaunchDivergenceSums(const DivergenceRowsParams& params,
                                               DivergenceStatistics* statistics,
                                               cudaStream_t stream);

/// Inputs and outputs of LaunchDivergenceGradient.
struct DivergenceGradientParams {
  DivergenceRowsParams rows;
  const DivergenceStatistics* statistics = nullptr;  ///< [num_rows]
  /// [num_rows]: gradients of a loss with respect to divergence and entropy; null: 0. A row with 0
  /// has no part of that gradient, even if its statistics are NaN.
  const double* d_divergence = nullptr;
  const double* d_entropy = nullptr;
  Dtype dtype = Dtype::kBf16;   ///< Element type of the gradients.
  void* gradients = nullptr;    ///< Output, [num_rows, gradient_stride], 16-byte aligned.
  int64_t gradient_stride = 0;  ///< Elements, at least num_columns, a multiple of 4.
};

/// Enqueues on `stream` the gradients with respect to the student's dot products and returns
/// without waiting. Only the first num_columns columns of a row are written. The rules of
/// LaunchDivergenceSums for threads and errors apply.
[[nodiscard]] cudaError_t LaunchDivergenceGradient(const DivergenceGradientParams& params,
                                                   cudaStream_t stream);

}  // namespace logprobd::kernels
