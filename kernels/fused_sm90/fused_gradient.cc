#include "kernels/fused_sm90/fused_gradient.h"

#include "kernels/fused_sm90/fused_choice.h"
#include "kernels/fused_sm90/fused_launch.h"

namespace logprobd::kernels {
namespace {

bool IsValid(const FusedGradientParams& params) {
  const int64_t columns = (params.head.tile_end - params.head.tile_begin) * kTileColumns;
  constexpr int64_t kAlignmentElements = 8;
  return internal::HasValidOperands(params.head) &&
         params.head.readable_rows >= params.head.num_rows && params.rows != nullptr &&
         params.gradients != nullptr && reinterpret_cast<uintptr_t>(params.gradients) % 16 == 0 &&
         params.gradient_stride >= columns && params.gradient_stride % kAlignmentElements == 0;
}

/// Launches the instance for a tile, a dtype and the transform of `params`.
template <FusedTile kTile, Dtype kDtype>
cudaError_t LaunchOf(const FusedGradientParams& params, const FusedChoice& choice,
                     cudaStream_t stream) {
  const bool transforms = params.head.bias != nullptr || !params.head.transform.IsIdentity() ||
                          params.mean_logit_weights != nullptr;
  return transforms
             ? internal::LaunchGradientInstance<kTile, kDtype, true>(params, choice, stream)
             : internal::LaunchGradientInstance<kTile, kDtype, false>(params, choice, stream);
}

/// Launches the instance for a tile and the dtype of `params`.
template <FusedTile kTile>
cudaError_t LaunchOf(const FusedGradientParams& params, const FusedChoice& choice,
                     cudaStream_t stream) {
  return params.head.dtype == Dtype::kBf16 ? LaunchOf<kTile, Dtype::kBf16>(params, choice, stream)
                                           : LaunchOf<kTile, Dtype::kF16>(params, choice, stream);
}

}  // namespace

cudaError_t LaunchFusedGradient(const FusedGradientParams& params, cudaStream_t stream) {
  const FusedPartialsParams& head = params.head;
  return LaunchFusedGradientAs(params,
                               ChooseGradient({.num_rows = head.num_rows,
                                               .num_tiles = head.tile_end - head.tile_begin,
                                               .depth = head.hidden_size * head.num_splits}),
                               stream);
}

cudaError_t LaunchFusedGradientAs(const FusedGradientParams& params, const FusedChoice& choice,
                                  cudaStream_t stream) {
  if (params.head.num_rows == 0) return cudaSuccess;
  if (!IsValid(params)) return cudaErrorInvalidValue;
  switch (choice.tile) {
    case FusedTile::k64Pair:
      return LaunchOf<FusedTile::k64Pair>(params, choice, stream);
    case FusedTile::k128PingPong:
      return LaunchOf<FusedTile::k128PingPong>(params, choice, stream);
    case FusedTile::kSwapped80:
      return LaunchOf<FusedTile::kSwapped80>(params, choice, stream);
    case FusedTile::kSwapped96:
      return LaunchOf<FusedTile::kSwapped96>(params, choice, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace logprobd::kernels
