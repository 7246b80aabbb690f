#include "kernels/fused_sm90/fused_partials.h"

#include "kernels/fused_sm80/mma_launch.h"
#include "kernels/fused_sm90/fused_choice.h"
#include "kernels/fused_sm90/fused_launch.h"

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

}  // namespace logprobd::kernels
