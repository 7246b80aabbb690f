#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/row_gradient.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchCachedGradients. Pointers point to device memory that the caller
/// owns and are 16-byte aligned. CachedExponentials (kernels/fused/params.h) defines
/// the exponentials and the exponents.
struct CachedGradientsParams {
  int64_t num_rows = 0;  ///< 0 to 2^31 - 1; 0 does nothing.
  /// One number in device memory, 0 to num_rows, or null. The kernel reads it and computes only the
  /// first *row_count rows; the output of the other rows is not touched.
  const int64_t* row_count = nullptr;
  /// [num_rows]: index of each row in the cache; null: row i is at index i.
  const int64_t* cached_rows = nullptr;
  const __nv_bfloat16* exponentials = nullptr;  ///< [cached rows, row_tiles, 192]
  const int32_t* exponents = nullptr;           ///< [cached rows, row_tiles]
  int64_t row_tiles = 0;                        ///< At least the number of tiles of the shard.
  int64_t exponent_stride = 0;                  ///< int32s from one row to the next; 0: row_tiles.
  int64_t tile_begin = 0;                       ///< First tile, counted from the shard's first.
  int64_t tile_end = 0;                         ///< > tile_begin, <= row_tiles.
  /// [num_rows], with the cached values of target and largest logit; `mean` is not used. If another
  /// shard holds a row's target, its target_column is not in this shard.
  const RowGradient* rows = nullptr;
  float softcap = 0.0F;        ///< Cap of the head (LogitTransform); 0: none.
  Dtype dtype = Dtype::kBf16;  ///< Element type of the gradients, kBf16 or kF16.
  /// Output, [num_rows, gradient_stride]. May be the memory of the exponentials of the same rows
  /// and tiles.
  void* gradients = nullptr;
  int64_t gradient_stride = 0;  ///< Elements, at least 192 per tile, a multiple of 8.
};

/// Enqueues on `stream` the gradients of the dot products of tiles [tile_begin, tile_end), computed
/// from cached exponentials, and returns without waiting. They differ from those of
/// LaunchFusedGradient by the rounding of the exponentials to bf16, except for the target and the
/// largest logit, which are cached in fp32.
///
/// Thread-safe. Returns cudaErrorInvalidValue if a parameter is out of range, otherwise the error
/// of the launch.
[[nodiscard]] cudaError_t LaunchCachedGradients(const CachedGradientsParams& params,
                                                cudaStream_t stream);

}  // namespace logprobd::kernels
