#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/row_gradient.h"
#include "kernels/row_ops/row_source.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchRowOperands. Pointers point to device memory that the caller owns.
struct RowOperandsParams {
  int64_t num_rows = 0;  ///< Computed rows, 0 to 2^31 - 1; 0 does nothing.
  RowSource source;
  float* log2_scales = nullptr;       ///< [num_rows], Log2Scale of each row's temperature.
  int32_t* target_columns = nullptr;  ///< [num_rows], -1 where another shard holds the target.
  float* target_logits = nullptr;     ///< [num_rows], set to 0.
  uint64_t* max_keys = nullptr;       ///< [num_rows], set to 0; null: not requested.
};

/// Enqueues on `stream` the computation of the per-row inputs of LaunchFusedPartials and returns
/// without waiting.
///
/// Thread-safe. Returns cudaErrorInvalidValue if a parameter is out of range, otherwise the error
/// of the launch.
[[nodiscard]] cudaError_t LaunchRowOperands(const RowOperandsParams& params, cudaStream_t stream);

/// Inputs and outputs of LaunchRowGradients. Pointers point to device memory that the caller owns.
struct RowGradientsParams {
  int64_t num_rows = 0;  ///< Computed rows, 0 to 2^31 - 1; 0 does nothing.
  RowSource source;
  int64_t ignore_index = 0;  ///< Rows with this target have no gradient.

  RowValues d_logprob;              ///< [all rows]: gradient of the loss by the logprob.
  RowValues d_entropy;              ///< [all rows]: gradient of the loss by the entropy.
  RowValues d_lse;                  ///< [all rows]: gradient of the loss by the lse.
  RowValues d_mean_logit;           ///< [all rows]: gradient of the loss by the mean logit.
  const float* lse = nullptr;       ///< [all rows], nats.
  const float* lse_rest = nullptr;  ///< [all rows], rounding error of `lse`: exact lse minus lse.
  const float* entropy = nullptr;   ///< [all rows], nats; required with d_entropy.

  /// gradient_scale of RowGradientOf divided by the row's log2_scale.
  double gradient_per_log2_scale = 0;

  /// [num_rows]: index of each row in the forward pass's cache; null: row i is at index i.
  const int64_t* cached_rows = nullptr;
  /// Logits of the targets, which the forward pass cached next to the exponentials. Null when the
  /// backward pass recomputes the logits.
  const float* target_logits = nullptr;
  /// LogitKeys of the largest logits, cached in the same way; their ids are columns of the shard.
  /// Null when the logits are recomputed, or when the largest logit is not needed in fp32.
  const uint64_t* max_keys = nullptr;
  int64_t cached_row_bytes = 0;  ///< Bytes from one cached row to the next; 0: contiguous.

  RowGradient* rows = nullptr;  ///< [num_rows]
};

/// Enqueues on `stream` the computation of every row's gradient constants (RowGradientOf) and
/// returns without waiting.
///
/// Thread-safe. Returns cudaErrorInvalidValue if a parameter is out of range, otherwise the error
/// of the launch.
[[nodiscard]] cudaError_t LaunchRowGradients(const RowGradientsParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
