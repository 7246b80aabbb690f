#include "kernels/fused/checks.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/sm80/mma_launch.h"
#include "kernels/fused/sm90/wgmma_launch.h"

namespace logprobd::kernels::internal {
namespace {

/// Launches the instance for a tile, a dtype and the transform of `params`.
template <FusedTile kTile, Dtype kDtype, bool kCachesExponentials = false>
cudaError_t LaunchOf(const FusedPartialsParams& params, cudaStream_t stream) {
  return HasTransform(params)
             ? LaunchMmaPartialsInstance<kTile, kDtype, true, kCachesExponentials>(params, stream)
             : LaunchMmaPartialsInstance<kTile, kDtype, false, kCachesExponentials>(params, stream);
}

/// Launches the instance for a dtype, the tile and the outputs of `params`.
template <Dtype kDtype>
cudaError_t LaunchOf(const FusedPartialsParams& params, FusedTile tile, cudaStream_t stream) {
  const bool caches_exponentials = params.exponentials.values != nullptr;
  if (tile == FusedTile::kMma128) {
    return caches_exponentials ? LaunchOf<FusedTile::kMma128, kDtype, true>(params, stream)
                               : LaunchOf<FusedTile::kMma128, kDtype>(params, stream);
  }
  if (tile != FusedTile::kMma64 || caches_exponentials) return cudaErrorInvalidValue;
  return LaunchOf<FusedTile::kMma64, kDtype>(params, stream);
}

/// Launches the instance for a dtype and the transform of `params`.
template <Dtype kDtype>
cudaError_t LaunchOf(const FusedGradientParams& params, cudaStream_t stream) {
  constexpr FusedTile kTile = FusedTile::kMma128;
  return HasTransform(params) ? LaunchMmaGradientInstance<kTile, kDtype, true>(params, stream)
                              : LaunchMmaGradientInstance<kTile, kDtype, false>(params, stream);
}

}  // namespace

cudaError_t LaunchMmaPartials(const FusedPartialsParams& params, FusedTile tile,
                              cudaStream_t stream) {
  return params.dtype == Dtype::kBf16 ? LaunchOf<Dtype::kBf16>(params, tile, stream)
                                      : LaunchOf<Dtype::kF16>(params, tile, stream);
}

cudaError_t LaunchMmaGradient(const FusedGradientParams& params, FusedTile tile,
                              cudaStream_t stream) {
  if (tile != FusedTile::kMma128) return cudaErrorInvalidValue;
  return params.head.dtype == Dtype::kBf16 ? LaunchOf<Dtype::kBf16>(params, stream)
                                           : LaunchOf<Dtype::kF16>(params, stream);
}

}  // namespace logprobd::kernels::internal
