#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/row_gradient.h"
#include "kernels/fused_sm90/fused_choice.h"
#include "kernels/fused_sm90/fused_partials.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchFusedGradient. Pointers are device memory and stay the caller's.
struct FusedGradientParams {
  /// Rows, weight, tiles, transform and bias, as LaunchFusedPartials takes them; the other fields
  /// are not read. The vocabulary is the shard: columns in `rows` are counted from its first.
  FusedPartialsParams head;
  const RowGradient* rows = nullptr;  ///< [num_rows]
  /// [tile_end * 192], w of RowGradient::mean, from the vocabulary's first column on; null: none.
  const float* mean_logit_weights = nullptr;
  /// [num_rows, gradient_stride] of head.dtype, 16-byte aligned, written: gradients of the dot
  /// products of the tiles. Columns beyond the vocabulary are set to 0.
  void* gradients = nullptr;
  int64_t gradient_stride = 0;  ///< Elements, at least 192 per tile, a multiple of 8.
};

/// Enqueues on `stream` the gradients of the dot products of tiles [tile_begin, tile_end) and
/// returns without waiting. The kernel recomputes the dot products and writes only their gradients.
/// A (row, column) has the same bits whatever the tiles and num_rows are.
///
/// Thread-safe. Requires compute capability 9.0 and a build with CUTLASS (HasFusedKernel). Returns
/// cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchFusedGradient(const FusedGradientParams& params,
                                              cudaStream_t stream);

/// As LaunchFusedGradient, with a given choice instead of the fastest one: the bits are the same.
/// For tests and measurements. Instances exist for k64Pair and k128PingPong.
[[nodiscard]] cudaError_t LaunchFusedGradientAs(const FusedGradientParams& params,
                                                const FusedChoice& choice, cudaStream_t stream);

}  // namespace logprobd::kernels
