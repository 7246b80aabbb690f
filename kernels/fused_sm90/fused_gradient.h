#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/row_gradient.h"
#include "kernels/fused_sm90/fused_choice.h"
#include "kernels/fused_sm90/fused_partials.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchFusedGradient. Pointers are device memory and stay the caller's.
struct FusedGradientParams {
  /// Rows, weight, tiles, transform and bias are used, as LaunchFusedPartials takes them. The
  /// vocabulary is the shard: what stands in `rows` counts columns from its first.
  FusedPartialsParams head;
  const RowGradient* rows = nullptr;  ///< [num_rows]
  /// [tile_end * 192], w of RowGradient::mean, from the vocabulary's first column on, or null.
  const float* mean_logit_weights = nullptr;
  /// [num_rows, gradient_stride] in head.dtype, 16-byte aligned: the gradient with respect to the
  /// dot products of the tiles, 0 in columns beyond the vocabulary.
  void* gradients = nullptr;
  int64_t gradient_stride = 0;  ///< Elements, >= 192 a tile, a multiple of 8.
};

/// Enqueues the dot products of tiles [tile_begin, tile_end), made once more, as their gradient on
/// `stream` and returns without waiting. A (row, column) has the same bits whatever the tiles and
/// num_rows are.
///
/// Thread-safe. Needs compute capability 9.0 and a build with CUTLASS: see HasFusedKernel. Returns
/// cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchFusedGradient(const FusedGradientParams& params,
                                              cudaStream_t stream);

/// The same by another instance or in another order than the fastest: same bits. For tests and
/// measurements. Tiles of 64 rows in pairs, and of 128, are built.
[[nodiscard]] cudaError_t LaunchFusedGradientAs(const FusedGradientParams& params,
                                                const FusedChoice& choice, cudaStream_t stream);

}  // namespace logprobd::kernels
