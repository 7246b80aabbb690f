#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/row_gradient.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchCachedGradients. Pointers are device memory, 16-byte aligned, and
/// stay the caller's. Powers and exponents are those of CachedExponentials (kernels/fused_sm90).
struct CachedGradientsParams {
  int64_t num_rows = 0;  ///< 0 to 2^31 - 1; 0 does nothing.
  /// Or null. In device memory, 0 to num_rows: as many rows are computed, as the kernel finds it;
  /// those of others are left as they are.
  const int64_t* row_count = nullptr;
  const int64_t* kept_places = nullptr;  ///< [num_rows]: rows of the exponentials; null: 0, 1, ...
  const __nv_bfloat16* exponentials = nullptr;  ///< [kept rows, row_tiles, 192]
  const int32_t* exponents = nullptr;           ///< [kept rows, row_tiles]
  int64_t row_tiles = 0;                        ///< Of the whole shard, or more.
  int64_t exponent_stride = 0;                  ///< int32s from row to row; 0: row_tiles.
  int64_t tile_begin = 0;                       ///< Tiles of the shard, half-open.
  int64_t tile_end = 0;                         ///< > tile_begin, <= row_tiles.
  /// [num_rows], with what was kept; `mean` is not used. A target of another shard is in no tile.
  const RowGradient* rows = nullptr;
  float softcap = 0.0F;        ///< 0: none.
  Dtype dtype = Dtype::kBf16;  ///< Of the gradients, kBf16 or kF16.
  /// [num_rows, gradient_stride]; may be where the exponentials of the same rows and tiles lie.
  void* gradients = nullptr;
  int64_t gradient_stride = 0;  ///< Elements, >= 192 a tile, a multiple of 8.
};

/// Enqueues the gradients with respect to the dot products of some tiles on `stream`, as
/// LaunchFusedGradient makes them, from the kept exponentials: they differ by the exponentials'
/// rounding, but for the target and the largest logit, which are known in fp32. Returns without
/// waiting.
///
/// Thread-safe. Returns cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchCachedGradients(const CachedGradientsParams& params,
                                                cudaStream_t stream);

}  // namespace logprobd::kernels
