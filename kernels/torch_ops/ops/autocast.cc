// Autocast of torch.ops.logprobd.linear_logprob, linear_divergence and their losses: hidden, weight
// and bias are cast as torch.nn.functional.linear casts its arguments.

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "kernels/torch_ops/ops/signatures.h"

namespace logprobd::torch_ops {
namespace {

/// Casts the tensors.
template <at::DeviceType kDevice, typename... Tensors>
void Cast(Tensors&... tensors) {
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  ((tensors = at::autocast::cached_cast(dtype, tensors, kDevice)), ...);
}

template <at::DeviceType kDevice>
void CastInputs(LinearLogprobInputs& inputs, const LinearLogprobOptions& options) {
  if (options.autocast) Cast<kDevice>(inputs.hidden, inputs.weight, inputs.bias);
}

template <at::DeviceType kDevice>
void CastInputs(DivergenceInputs& inputs, const DivergenceOptions& /*options*/) {
  Cast<kDevice>(inputs.student_hidden, inputs.student_weight, inputs.teacher_hidden,
                inputs.teacher_weight, inputs.student_bias, inputs.teacher_bias);
}

/// Calls an operator with cast inputs.
template <at::DeviceType kDevice, typename AnyOperator>
struct Autocast;
template <at::DeviceType kDevice, const char* kName, typename Result, typename Inputs,
          typename Options, typename... Others>
struct Autocast<kDevice, Operator<kName, Result(const Inputs&, const Options&, Others...)>> {
  using Called = Operator<kName, Result(const Inputs&, const Options&, Others...)>;

  static Result Call(const Inputs& inputs, const Options& options, Others... others) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    Inputs cast = inputs;
    CastInputs<kDevice>(cast, options);
    return Called::Call(cast, options, others...);
  }
  static void Register(torch::Library& library) { Called::template Register<&Call>(library); }
};

template <at::DeviceType kDevice>
void RegisterKernels(torch::Library& library) {
  Autocast<kDevice, ScoreOperator>::Register(library);
  Autocast<kDevice, LossOperator>::Register(library);
  Autocast<kDevice, DivergenceOperator>::Register(library);
  Autocast<kDevice, DivergenceLossOperator>::Register(library);
}

TORCH_LIBRARY_IMPL(logprobd, AutocastCPU, library) { RegisterKernels<at::kCPU>(library); }
TORCH_LIBRARY_IMPL(logprobd, AutocastCUDA, library) { RegisterKernels<at::kCUDA>(library); }

}  // namespace
}  // namespace logprobd::torch_ops
