#include "kernels/fused_sm90/fused_gradient.h"

#include "kernels/fused_sm90/fused_choice.h"
#include "kernels/fused_sm90/gradient_instance.h"
#include "kernels/fused_sm90/operands.h"

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

template <Dtype kDtype>
cudaError_t LaunchOf(const FusedGradientParams& params, const FusedChoice& choice,
                     cudaStream_t stream) {
  const bool transforms = params.head.bias != nullptr || !params.head.transform.IsIdentity() ||
                          params.column_weights != nullptr;
  return transforms ? internal::LaunchGradientInstance<kDtype, true>(params, choice, stream)
                    : internal::LaunchGradientInstance<kDtype, false>(params, choice, stream);
}

}  // namespace

cudaError_t LaunchFusedGradient(const FusedGradientParams& params, cudaStream_t stream) {
  const FusedPartialsParams& head = params.head;
  if (head.num_rows == 0) return cudaSuccess;
  if (!IsValid(params)) return cudaErrorInvalidValue;
  const FusedChoice choice = ChoosePingPong({.num_rows = head.num_rows,
                                             .num_tiles = head.tile_end - head.tile_begin,
                                             .depth = head.hidden_size * head.num_terms});
  return head.dtype == Dtype::kBf16 ? LaunchOf<Dtype::kBf16>(params, choice, stream)
                                    : LaunchOf<Dtype::kF16>(params, choice, stream);
}

}  // namespace logprobd::kernels
