#include "kernels/fused/launch.h"

#include <cstdint>

#include "kernels/common/tile.h"
#include "kernels/fused/checks.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/sm80/mma_launch.h"
#include "kernels/fused/sm90/wgmma_launch.h"

namespace logprobd::kernels {
namespace {

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

bool IsValid(const FusedGradientParams& params) {
  const int64_t columns = (params.head.tile_end - params.head.tile_begin) * kTileColumns;
  constexpr int64_t kAlignmentElements = 8;
  return internal::HasValidOperands(params.head) &&
         params.head.readable_rows >= params.head.num_rows && params.rows != nullptr &&
         params.gradients != nullptr && reinterpret_cast<uintptr_t>(params.gradients) % 16 == 0 &&
         params.gradient_stride >= columns && params.gradient_stride % kAlignmentElements == 0;
}

}  // namespace

FusedArch FusedArchOf(int device) {
  int major = 0;
  int minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return FusedArch::kNone;
  }
  if (major == 9 && minor == 0 && internal::HasWgmmaKernels()) return FusedArch::kSm90;
  return major >= 8 ? FusedArch::kSm80 : FusedArch::kNone;
}

FusedArch FusedArchOfCurrentDevice() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess ? FusedArchOf(device) : FusedArch::kNone;
}

cudaError_t LaunchFusedPartials(const FusedPartialsParams& params, cudaStream_t stream) {
  const FusedArch arch = FusedArchOfCurrentDevice();
  if (arch == FusedArch::kNone) return cudaErrorNotSupported;
  const FusedShape shape = {.num_rows = params.num_rows,
                            .num_tiles = params.tile_end - params.tile_begin,
                            .depth = params.hidden_size * params.num_splits};
  if (params.exponentials.values == nullptr) {
    return LaunchFusedPartialsAs(params, ChooseFor(arch, shape), stream);
  }
  const FusedChoice choice = arch == FusedArch::kSm90
                                 ? ChooseCaching(shape)
                                 : FusedChoice{FusedTile::kMma128, FusedRaster::kAlongRows, 1};
  return LaunchFusedPartialsAs(params, choice, stream);
}

cudaError_t LaunchFusedPartialsAs(const FusedPartialsParams& params, const FusedChoice& choice,
                                  cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  if (!IsValid(params)) return cudaErrorInvalidValue;
  return IsMma(choice.tile) ? internal::LaunchMmaPartials(params, choice.tile, stream)
                            : internal::LaunchWgmmaPartials(params, choice, stream);
}

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
