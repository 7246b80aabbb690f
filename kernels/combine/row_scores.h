#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchRowScores. Pointers refer to device memory, which the caller keeps
/// owning; an output that is null is not computed. row_sums.h defines the scores and their ranges.
struct RowScoresParams {
  int64_t num_rows = 0;                    ///< 0 to 2^31 - 1; 0 does nothing.
  int64_t num_tiles = 0;                   ///< Number of tiles passed, 1 to NumTiles(vocab_size).
  int64_t vocab_size = 0;                  ///< Columns of the whole vocabulary, 1 to 2^20.
  PartialLayout layout;                    ///< Layout of sums and entropy_sums.
  const TileSums* sums = nullptr;          ///< Partials of num_rows rows and num_tiles tiles.
  const TileSums* entropy_sums = nullptr;  ///< Partials at the entropy's temperature, or null.
  const uint64_t* max_keys = nullptr;      ///< [num_rows], LogitKey of the largest logit, or null.
  const uint32_t* min_keys = nullptr;  ///< [num_rows], ~OrderedBits of the smallest logit, or null.
  const float* log2_scales = nullptr;  ///< [num_rows]
  /// Truncation correction. max_logit and min_logit are multiplied by it; log2_scales already
  /// contain it.
  float logit_correction = 1.0F;
  const float* target_logits = nullptr;  ///< [num_rows]
  /// [num_rows], number of logits that rank above the target's (RanksAbove), or null.
  const int32_t* rank_counts = nullptr;

  RowNormalizer* normalizers = nullptr;  ///< [num_rows], always written; input of list_scores.h.
  uint8_t* nonfinite = nullptr;          ///< [num_rows], always written.
  // Each of these outputs has the shape [num_rows].
  float* logprob = nullptr;
  float* entropy = nullptr;
  float* lse = nullptr;
  float* lse_rest = nullptr;        ///< Rounding error of `lse`: exact lse minus lse.
  int32_t* argmax_id = nullptr;     ///< Requires `max_keys`.
  float* argmax_logprob = nullptr;  ///< Requires `max_keys`.
  float* max_logit = nullptr;       ///< Requires `max_keys`.
  float* min_logit = nullptr;       ///< Requires `min_keys`.
  float* sum_p_squared = nullptr;
  int32_t* target_rank = nullptr;  ///< Requires `rank_counts`.
};

/// Enqueues on `stream` the combination of every row's partials into its scores and returns without
/// waiting. A row with a NaN or +inf logit, or with -inf only, gets NaN, -1 as id
/// and rank, and nonfinite 1.
///
/// Thread-safe. Returns cudaErrorInvalidValue if a parameter is out of range, otherwise the error
/// of the launch.
[[nodiscard]] cudaError_t LaunchRowScores(const RowScoresParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
