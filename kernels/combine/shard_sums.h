#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/combine/row_scores.h"
#include "kernels/common/host_device.h"
#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"

namespace logprobd::kernels {

// These functions compute the scores of a head whose tiles are distributed over shards. There are
// three steps with a reduction over the shards after each of the first two: LaunchShardExponents, a
// reduction by kMaxInt32, LaunchShardSums, a reduction by kSumInt64, LaunchShardScores. The results
// are bit-identical to those of LaunchRowScores over all tiles, however the tiles are sharded.

/// Returns the number of sets of partials: one at the row's temperature, and one at the entropy's
/// temperature if it has its own.
LOGPROBD_HOST_DEVICE constexpr int64_t NumSumSets(bool has_entropy_sums) {
  return has_entropy_sums ? 2 : 1;
}

/// Returns the number of sums per row. In order they are: sum, weighted, the sum of squares if
/// requested; then sum and weighted of the entropy's set if there is one. With target_columns two
/// fields follow that are not counted: the bits of the target's logit, and the number of shards
/// that have the target.
LOGPROBD_HOST_DEVICE constexpr int64_t NumSumFields(bool wants_sum_squares, bool has_entropy_sums) {
  return 2 + (wants_sum_squares ? 1 : 0) + (has_entropy_sums ? 2 : 0);
}

/// Inputs and outputs of the first two steps. Pointers refer to device memory that the caller owns.
struct ShardSumsParams {
  int64_t num_rows = 0;                    ///< 0 to 2^31 - 1; 0 does nothing.
  int64_t num_tiles = 0;                   ///< Tiles of the shard, >= 0.
  PartialLayout layout;                    ///< Layout of sums and entropy_sums.
  const TileSums* sums = nullptr;          ///< Partials of num_rows rows and num_tiles tiles.
  const TileSums* entropy_sums = nullptr;  ///< Partials at the entropy's temperature, or null.
  bool wants_sum_squares = false;
  /// [NumSumSets, num_rows], largest exponent of each row. The first step writes the maximum over
  /// the shard's tiles; the second step reads the maximum over all shards.
  int32_t* exponents = nullptr;
  /// [num_rows], column of the row's target, below 0 if another shard has it; or null, if the
  /// caller exchanges the logits of the targets.
  const int32_t* target_columns = nullptr;
  const float* target_logits = nullptr;  ///< [num_rows], read where target_columns is not below 0.
  /// [NumSumFields, num_rows], or two fields more with target_columns; written by the second step.
  int64_t* row_sums = nullptr;
};

/// Inputs and outputs of the last step. Pointers refer to device memory that the caller owns.
struct ShardScoresParams {
  /// Parameters of LaunchRowScores, of which num_tiles, layout, sums and entropy_sums are not read.
  RowScoresParams scores;
  bool has_sum_squares = false;   ///< row_sums contains squares; scores.sum_p_squared requires it.
  bool has_entropy_sums = false;  ///< exponents and row_sums contain the entropy's own set.
  const int32_t* exponents = nullptr;  ///< [NumSumSets, num_rows], largest over all shards.
  /// [NumSumFields, num_rows], or two fields more with target_logits; summed over all shards.
  const int64_t* row_sums = nullptr;
  /// [num_rows], receives the logits of the targets that row_sums contains; may be
  /// scores.target_logits. Null: row_sums does not contain them.
  float* target_logits = nullptr;
};

/// Each function enqueues one step on `stream` and returns without waiting. A row with a NaN or
/// +inf logit on any shard, or whose logits are all -inf, gets NaN, -1 as
/// id and rank, and nonfinite 1.
///
/// Thread-safe. Returns cudaErrorInvalidValue if a parameter is out of range, otherwise the result
/// of the launch.
[[nodiscard]] cudaError_t LaunchShardExponents(const ShardSumsParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t LaunchShardSums(const ShardSumsParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t LaunchShardScores(const ShardScoresParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
