#include "kernels/fused_sm90/fused_partials.h"

#include "kernels/fused_sm90/fused_choice.h"
#include "kernels/fused_sm90/fused_launch.h"

namespace logprobd::kernels {
namespace {

bool HasTransform(const FusedPartialsParams& params) {
  return params.bias != nullptr || !params.transform.IsIdentity();
}

bool HasValidExponentials(const FusedPartialsParams& params) {
  const CachedExponentials& exponentials = params.exponentials;
  return exponentials.values == nullptr ||
         (reinterpret_cast<uintptr_t>(exponentials.values) % 16 == 0 &&
          exponentials.exponents != nullptr && !params.wants_sum_squares &&
          exponentials.row_tiles >= params.tile_end - params.tile_begin &&
          exponentials.exponent_stride >= 0);
}

bool IsValid(const FusedPartialsParams& params) {
  return internal::HasValidOperands(params) && params.readable_rows >= params.num_rows &&
         params.log2_scales != nullptr && params.targets != nullptr &&
         (params.entropy_sums == nullptr) == (params.entropy_log2_scales == nullptr) &&
         params.layout.row_stride >= 1 && params.layout.tile_stride >= 1 &&
         params.sums != nullptr && params.target_logits != nullptr && HasValidExponentials(params);
}

/// Launches the instance for a tile, a dtype and the transform of `params`.
template <FusedTile kTile, Dtype kDtype, bool kCachesExponentials = false>
cudaError_t LaunchOf(const FusedPartialsParams& params, const FusedChoice& choice,
                     cudaStream_t stream) {
  return HasTransform(params)
             ? internal::LaunchFusedInstance<kTile, kDtype, true, kCachesExponentials>(
                   params, choice, stream)
             : internal::LaunchFusedInstance<kTile, kDtype, false, kCachesExponentials>(
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
    case FusedTile::k256Cooperative:
      return LaunchOf<FusedTile::k256Cooperative, kDtype>(params, choice, stream);
    case FusedTile::kSwapped80:
      return LaunchOf<FusedTile::kSwapped80, kDtype>(params, choice, stream);
    case FusedTile::kSwapped96:
      return LaunchOf<FusedTile::kSwapped96, kDtype>(params, choice, stream);
    case FusedTile::kSwapped112:
      return LaunchOf<FusedTile::kSwapped112, kDtype>(params, choice, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

bool HasFusedKernel() { return true; }

cudaError_t LaunchFusedPartials(const FusedPartialsParams& params, cudaStream_t stream) {
  const FusedShape shape = {.num_rows = params.num_rows,
                            .num_tiles = params.tile_end - params.tile_begin,
                            .depth = params.hidden_size * params.num_splits};
  const bool caches_exponentials = params.exponentials.values != nullptr;
  return LaunchFusedPartialsAs(
      params, caches_exponentials ? ChooseCaching(shape) : ChooseFused(shape), stream);
}

cudaError_t LaunchFusedPartialsAs(const FusedPartialsParams& params, const FusedChoice& choice,
                                  cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  if (!IsValid(params)) return cudaErrorInvalidValue;
  return params.dtype == Dtype::kBf16 ? LaunchOf<Dtype::kBf16>(params, choice, stream)
                                      : LaunchOf<Dtype::kF16>(params, choice, stream);
}

}  // namespace logprobd::kernels
