#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/row_gradient.h"
#include "kernels/fused_sm90/fused_choice.h"
#include "kernels/fused_sm90/fused_partials.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchFusedGradient. Pointers point to device memory that the caller owns.
struct FusedGradientParams {
  /// Rows, weight, tiles, transform and bias, as LaunchFusedPartials takes them; the other fields
  /// are not read. The vocabulary is the shard: columns in `rows` are counted from the shard's
  /// first column.
  FusedPartialsParams head;
  const RowGradient* rows = nullptr;  ///< [num_rows]
  /// [tile_end * 192], the weights w in RowGradient's formula, starting at the vocabulary's first
  /// column. Null: gradients have no term with `mean`.
  const float* mean_logit_weights = nullptr;
  /// Output, [num_rows, gradient_stride] of head.dtype, 16-byte aligned: gradients of the dot
  /// products of the tiles. Columns beyond the vocabulary are set to 0.
  void* gradients = nullptr;
  int64_t gradient_stride = 0;  ///< Elements, at least 192 per tile, a multiple of 8.
};

/// Enqueues on `stream` the gradients of the dot products of tiles [tile_begin, tile_end) and
/// returns without waiting. The kernel recomputes the dot products and writes only their gradients.
/// The gradient of a row and column has the same bits whatever the tiles and num_rows are.
///
/// Thread-safe. Returns cudaErrorNotSupported below compute capability 8.0, cudaErrorInvalidValue
/// if a parameter is out of range, otherwise the error of the launch.
[[nodiscard]] cudaError_t LaunchFusedGradient(const FusedGradientParams& params,
                                              cudaStream_t stream);

/// Does the same as LaunchFusedGradient, with the same bits, but with `choice` instead of the
/// fastest choice. It is meant for tests and measurements. Instances exist for the tiles of
/// ChooseGradient and for kMma128.
[[nodiscard]] cudaError_t LaunchFusedGradientAs(const FusedGradientParams& params,
                                                const FusedChoice& choice, cudaStream_t stream);

}  // namespace logprobd::kernels
