// The choice among the instances of the CUTLASS kernel.

#include "kernels/fused/checks.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/sm90/wgmma_launch.h"

namespace logprobd::kernels::internal {
namespace {

/// Launches the instance for a tile, a dtype and the transform of `params`.
template <FusedTile kTile, Dtype kDtype, bool kCachesExponentials = false>
cudaError_t LaunchOf(const FusedPartialsParams& params, const FusedChoice& choice,
                     cudaStream_t stream) {
  return HasTransform(params)
             ? LaunchWgmmaPartialsInstance<kTile, kDtype, true, kCachesExponentials>(params, choice,
                                                                                     stream)
             : LaunchWgmmaPartialsInstance<kTile, kDtype, false, kCachesExponentials>(
                   params, choice, stream);
}

/// Launches the instance for a dtype, the choice's tile and the outputs of `params`.
template <Dtype kDtype>
cudaError_t LaunchOf(const FusedPartialsParams& params, const FusedChoice& choice,
                     cudaStream_t stream) {
  if (params.exponentials.values != nullptr) {
    switch (choice.tile) {
      case FusedTile::k128PingPong:
        return LaunchOf<FusedTile::k128PingPong, kDtype, true>(params, choice, stream);
      case FusedTile::k128Columns:
        return LaunchOf<FusedTile::k128Columns, kDtype, true>(params, choice, stream);
      case FusedTile::kSwapped80:
        return LaunchOf<FusedTile::kSwapped80, kDtype, true>(params, choice, stream);
      case FusedTile::kSwapped96:
        return LaunchOf<FusedTile::kSwapped96, kDtype, true>(params, choice, stream);
      default:
        return cudaErrorInvalidValue;
    }
  }
  switch (choice.tile) {
    case FusedTile::k64PingPong:
      return LaunchOf<FusedTile::k64PingPong, kDtype>(params, choice, stream);
    case FusedTile::k64Pair:
      return LaunchOf<FusedTile::k64Pair, kDtype>(params, choice, stream);
    case FusedTile::k128PingPong:
      return LaunchOf<FusedTile::k128PingPong, kDtype>(params, choice, stream);
    case FusedTile::k128Columns:
      return LaunchOf<FusedTile::k128Columns, kDtype>(params, choice, stream);
    case FusedTile::k256Cooperative:
      return LaunchOf<FusedTile::k256Cooperative, kDtype>(params, choice, stream);
    case FusedTile::kSwapped80:
      return LaunchOf<FusedTile::kSwapped80, kDtype>(params, choice, stream);
    case FusedTile::kSwapped96:
      return LaunchOf<FusedTile::kSwapped96, kDtype>(params, choice, stream);
    case FusedTile::kSwapped112:
      return LaunchOf<FusedTile::kSwapped112, kDtype>(params, choice, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

/// Launches the instance for a tile, a dtype and the transform of `params`.
template <FusedTile kTile, Dtype kDtype>
cudaError_t LaunchOf(const FusedGradientParams& params, const FusedChoice& choice,
                     cudaStream_t stream) {
  return HasTransform(params)
             ? LaunchWgmmaGradientInstance<kTile, kDtype, true>(params, choice, stream)
             : LaunchWgmmaGradientInstance<kTile, kDtype, false>(params, choice, stream);
}

/// Launches the instance for a tile and the dtype of `params`.
template <FusedTile kTile>
cudaError_t LaunchOf(const FusedGradientParams& params, const FusedChoice& choice,
                     cudaStream_t stream) {
  return params.head.dtype == Dtype::kBf16 ? LaunchOf<kTile, Dtype::kBf16>(params, choice, stream)
                                           : LaunchOf<kTile, Dtype::kF16>(params, choice, stream);
}

}  // namespace

bool HasWgmmaKernels() { return true; }

cudaError_t LaunchWgmmaPartials(const FusedPartialsParams& params, const FusedChoice& choice,
                                cudaStream_t stream) {
  return params.dtype == Dtype::kBf16 ? LaunchOf<Dtype::kBf16>(params, choice, stream)
                                      : LaunchOf<Dtype::kF16>(params, choice, stream);
}

cudaError_t LaunchWgmmaGradient(const FusedGradientParams& params, const FusedChoice& choice,
                                cudaStream_t stream) {
  switch (choice.tile) {
    case FusedTile::k64Pair:
      return LaunchOf<FusedTile::k64Pair>(params, choice, stream);
    case FusedTile::k128PingPong:
      return LaunchOf<FusedTile::k128PingPong>(params, choice, stream);
    case FusedTile::k128Columns:
      return LaunchOf<FusedTile::k128Columns>(params, choice, stream);
    case FusedTile::kSwapped80:
      return LaunchOf<FusedTile::kSwapped80>(params, choice, stream);
    case FusedTile::kSwapped96:
      return LaunchOf<FusedTile::kSwapped96>(params, choice, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace logprobd::kernels::internal
