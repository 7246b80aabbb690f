#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/chunked/logit_chunk.h"
#include "kernels/common/tile.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchTileStats. Pointers are device memory and stay the caller's.
struct TileStatsParams {
  LogitChunk chunk;
  const float* log2_scales = nullptr;          ///< [num_rows], Log2Scale of the temperature.
  const float* entropy_log2_scales = nullptr;  ///< [num_rows]; null: no second sums.
  const int32_t* targets = nullptr;            ///< [num_rows], ids in the whole vocabulary.

  /// First tile of the shard that the chunk is part of: both sums begin with it.
  int64_t tile_origin = 0;
  PartialLayout layout;              ///< Of both sums.
  TileSums* sums = nullptr;          ///< The chunk's are written.
  TileSums* entropy_sums = nullptr;  ///< The same at entropy_log2_scales; null with them.
  bool wants_sum_squares = false;    ///< Else TileSums::sum_squares is 0.

  float* target_logits = nullptr;  ///< [num_rows]; written where the chunk holds the target.
  /// [num_rows], raised to the LogitKey of the largest logit; null: not asked.
  uint64_t* max_keys = nullptr;
  /// [num_rows], raised to ~OrderedBits of the smallest logit; null: not asked.
  uint32_t* min_keys = nullptr;
};

/// Enqueues the partials of every tile of a chunk on `stream` and returns without waiting. The bits
/// of a (row, tile) depend on its logits and scales alone, not on what else is asked.
///
/// Thread-safe. Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchTileStats(const TileStatsParams& params, cudaStream_t stream);

/// Whether this build holds code for the current device: cudaErrorNoKernelImageForDevice if not.
[[nodiscard]] cudaError_t ProbeTileStats();

}  // namespace logprobd::kernels
