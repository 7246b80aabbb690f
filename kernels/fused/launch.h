#pragma once

#include <cuda_runtime_api.h>

#include "kernels/fused/choice.h"
#include "kernels/fused/params.h"

namespace logprobd::kernels {

/// Returns the kernels that the launches choose on a GPU. FusedArchOfCurrentDevice does the same
/// for the calling thread's current device.
[[nodiscard]] FusedArch FusedArchOf(int device);
[[nodiscard]] FusedArch FusedArchOfCurrentDevice();

/// Enqueues the partials of every row and tile on `stream` and returns without waiting. Logits
/// exist in registers only. The partials of a row and tile have the same bits on one GPU whatever
/// num_rows is and whatever else is requested, and LaunchTileStats computes the same bits from the
/// same logits.
///
/// Thread-safe. Returns cudaErrorNotSupported below compute capability 8.0, cudaErrorInvalidValue
/// if a parameter is out of range, otherwise the error of the launch.
[[nodiscard]] cudaError_t LaunchFusedPartials(const FusedPartialsParams& params,
                                              cudaStream_t stream);

/// Does the same as LaunchFusedPartials, with the same bits, but with `choice` instead of the
/// fastest choice. It is meant for tests and measurements. kMma tiles run on every GPU; the others
/// require FusedArch::kSm90.
[[nodiscard]] cudaError_t LaunchFusedPartialsAs(const FusedPartialsParams& params,
                                                const FusedChoice& choice, cudaStream_t stream);

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
