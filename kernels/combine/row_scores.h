#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchRowScores. Pointers are device memory and stay the caller's; an
/// output that is null is not asked. Meanings and ranges: row_sums.h.
struct RowScoresParams {
  int64_t num_rows = 0;                    ///< 0 to 2^31 - 1; 0 does nothing.
  int64_t num_tiles = 0;                   ///< Tiles given, 1 to NumTiles(vocab_size).
  int64_t vocab_size = 0;                  ///< Of the whole vocabulary, 1 to 2^20.
  PartialLayout layout;                    ///< Of both sums.
  const TileSums* sums = nullptr;          ///< num_rows x num_tiles
  const TileSums* entropy_sums = nullptr;  ///< The same at the entropy's temperature, or null.
  const uint64_t* max_keys = nullptr;      ///< [num_rows], LogitKey of the largest logit, or null.
  const uint32_t* min_keys = nullptr;  ///< [num_rows], ~OrderedBits of the smallest logit, or null.
  const float* log2_scales = nullptr;  ///< [num_rows]
  /// What max_logit and min_logit are multiplied by: the correction within log2_scales.
  float logit_correction = 1.0F;
  const float* target_logits = nullptr;  ///< [num_rows]
  /// The kernel that writes the partials comes just before on the stream: this one may be brought
  /// up beside its end. Set it only then.
  bool follows_partials = false;

  RowNormalizer* normalizers = nullptr;  ///< [num_rows], always written: list_scores.h needs it.
  uint8_t* nonfinite = nullptr;          ///< [num_rows], always written.
  float* logprob = nullptr;              ///< [num_rows], as all below.
  float* entropy = nullptr;
  float* lse = nullptr;
  float* lse_rest = nullptr;     ///< What rounding took from lse.
  int32_t* argmax_id = nullptr;  ///< As the next two: needs `max_keys`.
  float* argmax_logprob = nullptr;
  float* max_logit = nullptr;
  float* min_logit = nullptr;  ///< Needs `min_keys`.
  float* sum_p_squared = nullptr;
};

/// Enqueues the joining of every row's tile partials into its scores on `stream` and returns
/// without waiting. A row with NaN or +inf, or with -inf alone, gets NaN, id -1 and nonfinite 1.
///
/// Thread-safe. Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchRowScores(const RowScoresParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
