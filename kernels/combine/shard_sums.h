#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/combine/row_scores.h"
#include "kernels/common/host_device.h"
#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"

namespace logprobd::kernels {

// Scores of a head whose tiles lie on several shards, in three steps with an exchange between each
// two: LaunchShardExponents, join by kMaxInt32, LaunchShardSums, join by kSumInt64,
// LaunchShardScores. The bits are LaunchRowScores's over all tiles, however they are cut.

/// Sets of partials: at the row's temperature, and at the entropy's own.
LOGPROBD_HOST_DEVICE constexpr int64_t NumSumSets(bool has_entropy_sums) {
  return has_entropy_sums ? 2 : 1;
}

/// Sums of a row: sum, weighted, sum of squares where wanted; then sum and weighted of the
/// entropy's own set where there is one.
LOGPROBD_HOST_DEVICE constexpr int64_t NumSumFields(bool wants_sum_squares, bool has_entropy_sums) {
  return 2 + (wants_sum_squares ? 1 : 0) + (has_entropy_sums ? 2 : 0);
}

/// Inputs and outputs of the first two steps. Pointers are device memory and stay the caller's.
struct ShardSumsParams {
  int64_t num_rows = 0;                    ///< 0 to 2^31 - 1; 0 does nothing.
  int64_t num_tiles = 0;                   ///< The shard's, >= 1.
  PartialLayout layout;                    ///< Of both sums.
  const TileSums* sums = nullptr;          ///< num_rows x num_tiles
  const TileSums* entropy_sums = nullptr;  ///< The same at the entropy's temperature, or null.
  bool wants_sum_squares = false;
  /// [NumSumSets, num_rows], the row's largest: of the shard, written by the first step; of all
  /// shards, read by the second.
  int32_t* exponents = nullptr;
  int64_t* row_sums = nullptr;  ///< [NumSumFields, num_rows], written by the second step alone.
};

/// Inputs and outputs of the last step. Pointers are device memory and stay the caller's.
struct ShardScoresParams {
  /// As LaunchRowScores takes it; num_tiles, layout, both sums and follows_partials are not read.
  RowScoresParams scores;
  bool has_sum_squares = false;        ///< Among row_sums; scores.sum_p_squared needs it.
  bool has_entropy_sums = false;       ///< Among exponents and row_sums.
  const int32_t* exponents = nullptr;  ///< [NumSumSets, num_rows], largest of all shards.
  const int64_t* row_sums = nullptr;   ///< [NumSumFields, num_rows], summed over all shards.
};

/// Enqueue a step on `stream` and return without waiting; thread-safe. A row with NaN or +inf on
/// any shard, or with -inf alone on all, gets NaN, id -1 and nonfinite 1.
///
/// cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchShardExponents(const ShardSumsParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t LaunchShardSums(const ShardSumsParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t LaunchShardScores(const ShardScoresParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
