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
  int64_t partial_stride = 0;  ///< Partials from one row to the next: tiles of the vocabulary.

  float* target_logits = nullptr;    ///< [num_rows]; written where the chunk holds the target.
  TileSums* sums = nullptr;          ///< [num_rows, partial_stride], the chunk's tiles written.
  TileSums* entropy_sums = nullptr;  ///< The same at entropy_log2_scales; null with them.
  TileExtremes* extremes = nullptr;  ///< Likewise; null: not asked.
  bool wants_sum_squares = false;    ///< Else TileSums::sum_squares is 0.
};

/// Enqueues the partials of every tile of a chunk on `stream` and returns without waiting. The bits
/// of a (row, tile) depend on its logits and scales alone, not on what else is asked.
///
/// Thread-safe. Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchTileStats(const TileStatsParams& params, cudaStream_t stream);

/// Whether this build holds code for the current device: cudaErrorNoKernelImageForDevice if not.
[[nodiscard]] cudaError_t ProbeTileStats();

}  // namespace logprobd::kernels
