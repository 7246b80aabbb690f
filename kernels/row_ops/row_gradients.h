#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/row_gradient.h"
#include "kernels/row_ops/row_source.h"
#include "kernels/row_ops/row_values.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchRowGradients. Pointers are device memory and stay the caller's.
struct RowGradientsParams {
  int64_t num_rows = 0;  ///< 0 to 2^31 - 1; 0 does nothing.
  RowSource source;
  int64_t ignore_index = 0;  ///< Rows with this target have no gradient.

  // [all rows]; gradients of the loss.
  RowValues d_logprob;
  RowValues d_entropy;
  RowValues d_lse;
  RowValues d_mean_logit;
  const float* lse = nullptr;       ///< Nats.
  const float* lse_rest = nullptr;  ///< What rounding took from lse.
  const float* entropy = nullptr;   ///< Nats; needed with d_entropy.

  /// RowGradientOf's gradient_scale over a row's log2_scale.
  double gradient_per_log2_scale = 0;

  /// As kept beside the exponentials, at the row's kept place; both null where logits are made
  /// anew, the keys where nothing asks for the largest logit in fp32.
  const int64_t* kept_places = nullptr;  ///< [num_rows]; null: the row's own number.
  const float* target_logits = nullptr;
  const uint64_t* max_keys = nullptr;  ///< LogitKeys with columns of the shard.
  int64_t kept_row_bytes = 0;          ///< From a row's to the next row's; 0: they lie together.

  RowGradient* rows = nullptr;  ///< [num_rows]
};

/// Enqueues the making of every row's constants (RowGradientOf) on `stream` and returns without
/// waiting. Thread-safe. Returns cudaErrorInvalidValue when a bound is broken, else the launch's
/// own error.
[[nodiscard]] cudaError_t LaunchRowGradients(const RowGradientsParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
