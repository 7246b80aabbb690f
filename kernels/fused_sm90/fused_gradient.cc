#include "kernels/fused_sm90/fused_gradient.h"

#include "kernels/fused_sm80/mma_launch.h"
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

}  // namespace

cudaError_t LaunchFusedGradient(const FusedGradientParams& params, cudaStream_t stream) {
  const FusedArch arch = FusedArchOfCurrentDevice();
  if (arch == FusedArch::kNone) return cudaErrorNotSupported;
  if (arch != FusedArch::kSm90) {
    return LaunchFusedGradientAs(params, {FusedTile::kMma128, FusedRaster::kAlongRows, 1}, stream);
  }
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
  return IsMma(choice.tile) ? internal::LaunchMmaGradient(params, choice.tile, stream)
                            : internal::LaunchWgmmaGradient(params, choice, stream);
}

}  // namespace logprobd::kernels
