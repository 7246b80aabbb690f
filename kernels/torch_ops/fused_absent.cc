// Stands in for the fused way where the build has no CUDA.

#include <c10/util/Exception.h>

#include "kernels/torch_ops/device_memory.h"
#include "kernels/torch_ops/fused_dot_gradients.h"
#include "kernels/torch_ops/fused_forward.h"
#include "kernels/torch_ops/fused_row_loss.h"
#include "kernels/torch_ops/fused_row_selection.h"
#include "kernels/torch_ops/fused_scale.h"

namespace logprobd::torch_ops {

bool HasFusedKernels() { return false; }

bool IsForwardFused(const LinearLogprobInputs& /*inputs*/, const LinearLogprobOptions& options) {
  TORCH_CHECK_VALUE(options.keep_logits != KeptLogits::kExponentials,
                    "keep_logits is 2: this build has no fused kernels");
  return false;
}

bool AreScoredWhileSearched(const LinearLogprobInputs& /*inputs*/,
                            const LinearLogprobOptions& /*options*/) {
  return false;
}

void ReserveFusedRoom(int64_t /*num_rows*/, const LinearLogprobInputs& /*inputs*/,
                      const LinearLogprobOptions& /*options*/) {}

std::unique_ptr<PendingScores> BeginFusedScores(const Rows& /*rows*/,
                                                const LinearLogprobInputs& /*inputs*/,
                                                const LinearLogprobOptions& /*options*/,
                                                const Shard& /*shard*/,
                                                const at::Tensor& /*cache*/) {
  TORCH_INTERNAL_ASSERT(false, "this build has no fused kernels");
}

std::unique_ptr<DotGradients> MakeFusedDotGradients(const DotGradientsArguments& /*arguments*/) {
  return nullptr;
}

bool IsCaptured(const at::Device& /*device*/) { return false; }

std::shared_ptr<RowCompaction> StartRowCompaction(const at::Tensor& /*target*/,
                                                  int64_t /*ignore_index*/,
                                                  const UpstreamGradients& /*upstream*/,
                                                  IdRange /*owned*/, Search /*search*/) {
  return nullptr;
}

bool AreDifferentiatedWhileSearched(const UpstreamGradients& /*upstream*/,
                                    const LinearLogprobInputs& /*inputs*/,
                                    const LinearLogprobOptions& /*options*/,
                                    const Shard& /*shard*/) {
  return false;
}

std::optional<at::Tensor> RowLossOnGpu(const LinearLogprobOutputs& /*scores*/,
                                       const UpstreamGradients& /*weights*/) {
  return std::nullopt;
}

int64_t FreeBytes(int64_t /*device*/, int64_t /*enough*/) { return 0; }

bool ScaleOnGpu(const at::Tensor& /*gradient*/, const at::Tensor& /*factor*/) { return false; }

bool MultiplyRowsOnGpu(const at::Tensor& /*rows*/, const at::Tensor& /*factors*/,
                       const at::Tensor& /*products*/) {
  return false;
}

}  // namespace logprobd::torch_ops
