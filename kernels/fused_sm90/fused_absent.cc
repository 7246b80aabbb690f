// The entry points of this folder in a build without CUTLASS: each returns cudaErrorNotSupported.

#include "kernels/fused_sm90/fused_gradient.h"
#include "kernels/fused_sm90/fused_partials.h"
#include "kernels/fused_sm90/fused_top_k.h"
#include "kernels/fused_sm90/listed_logits.h"

namespace logprobd::kernels {

bool HasFusedKernel() { return false; }

cudaError_t LaunchFusedPartials(const FusedPartialsParams& /*params*/, cudaStream_t /*stream*/) {
  return cudaErrorNotSupported;
}

cudaError_t LaunchFusedPartialsAs(const FusedPartialsParams& /*params*/,
                                  const FusedChoice& /*choice*/, cudaStream_t /*stream*/) {
  return cudaErrorNotSupported;
}

cudaError_t LaunchFusedGradient(const FusedGradientParams& /*params*/, cudaStream_t /*stream*/) {
  return cudaErrorNotSupported;
}

cudaError_t LaunchFusedGradientAs(const FusedGradientParams& /*params*/,
                                  const FusedChoice& /*choice*/, cudaStream_t /*stream*/) {
  return cudaErrorNotSupported;
}

cudaError_t LaunchFusedTopK(const FusedTopKParams& /*params*/, cudaStream_t /*stream*/) {
  return cudaErrorNotSupported;
}

cudaError_t LaunchListedLogits(const ListedLogitsParams& /*params*/, cudaStream_t /*stream*/) {
  return cudaErrorNotSupported;
}

}  // namespace logprobd::kernels
