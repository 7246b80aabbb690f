// Autocast of torch.ops.logprobd.linear_logprob and linear_logprob_loss: hidden, weight and bias
// are cast as torch.nn.functional.linear casts its arguments.

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "kernels/torch_ops/api/linear_logprob.h"
#include "kernels/torch_ops/api/signatures.h"
#include "kernels/torch_ops/loss/loss.h"

namespace logprobd::torch_ops {
namespace {

template <at::DeviceType kDevice>
LinearLogprobInputs CastInputs(const LinearLogprobInputs& inputs,
                               const LinearLogprobOptions& options) {
  if (!options.autocast) return inputs;
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  LinearLogprobInputs cast = inputs;
  cast.hidden = at::autocast::cached_cast(dtype, inputs.hidden, kDevice);
  cast.weight = at::autocast::cached_cast(dtype, inputs.weight, kDevice);
  cast.bias = at::autocast::cached_cast(dtype, inputs.bias, kDevice);
  return cast;
}

template <at::DeviceType kDevice>
Outputs Score(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
              const MaybeTensor& weight_grad) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return ScoreOperator::Call(kScore, CastInputs<kDevice>(inputs, options), options, weight_grad);
}

template <at::DeviceType kDevice>
LossOutputs Loss(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                 const LossCoefficients& coefficients, Needs needs, int64_t cache_bytes) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return LossOperator::Call(kLoss, CastInputs<kDevice>(inputs, options), options, coefficients,
                            needs, cache_bytes);
}

template <at::DeviceType kDevice>
void RegisterKernels(torch::Library& library) {
  library.impl("linear_logprob", ScoreOperator::Kernel<&Score<kDevice>>());
  library.impl("linear_logprob_loss", LossOperator::Kernel<&Loss<kDevice>>());
}

TORCH_LIBRARY_IMPL(logprobd, AutocastCPU, library) { RegisterKernels<at::kCPU>(library); }
TORCH_LIBRARY_IMPL(logprobd, AutocastCUDA, library) { RegisterKernels<at::kCUDA>(library); }

}  // namespace
}  // namespace logprobd::torch_ops
