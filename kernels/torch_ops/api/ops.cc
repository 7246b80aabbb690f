// Registers torch.ops.logprobd.*: schemas, kernels for CPU and CUDA, and shapes for tracing.

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "kernels/torch_ops/api/linear_logprob.h"
#include "kernels/torch_ops/api/signatures.h"
#include "kernels/torch_ops/loss/loss.h"
#include "kernels/torch_ops/paths/logit_cache.h"
#include "kernels/torch_ops/rows/device_ops.h"

namespace logprobd::torch_ops {
namespace {

using at::Tensor;

// Kernels.

Outputs Score(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
              const MaybeTensor& weight_grad) {
  return ToTuple(Forward(inputs, options, weight_grad));
}

Gradients Differentiate(const UpstreamGradients& upstream, const SavedOutputs& saved,
                        const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                        Needs needs) {
  return ToTuple(Backward(upstream, inputs, saved, options, ToGradientNeeds(needs, inputs.bias),
                          std::nullopt));
}

HiddenAndBiasGradients DifferentiateInto(const UpstreamGradients& upstream,
                                         const SavedOutputs& saved,
                                         const LinearLogprobInputs& inputs,
                                         const LinearLogprobOptions& options, Needs needs,
                                         Tensor& weight_grad) {
  const InputGradients gradients =
      Backward(upstream, inputs, saved, options, ToGradientNeeds(needs, inputs.bias), weight_grad);
  return {gradients.hidden, gradients.bias};
}

LossOutputs ToLossOutputs(const Tensor& loss, const LinearLogprobOutputs& outputs,
                          const Gradients& gradients) {
  return std::tuple_cat(std::tuple(loss), ToTuple(outputs, LinearLogprobOutputs::Scores()),
                        gradients);
}

LossOutputs Loss(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                 const LossCoefficients& coefficients, Needs needs, int64_t cache_bytes) {
  const auto [loss, scores, gradients] = ForwardWithGradients(
      coefficients, inputs, options, ToGradientNeeds(needs, inputs.bias), cache_bytes);
  return ToLossOutputs(loss, scores, ToTuple(gradients));
}

int64_t FreeBytes(int64_t device, int64_t enough) {
  return DeviceOps::For(at::kCUDA).FreeBytes(device, enough);
}

bool AreSavedTensorsHooked() { return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty(); }

bool IsFused(at::Device device, at::ScalarType hidden, at::ScalarType weight, int64_t hidden_size) {
  return DeviceOps::For(device.type()).FusedPath(device, hidden, weight, hidden_size) != nullptr;
}

std::string SlowPathReason(at::Device device, at::ScalarType hidden, at::ScalarType weight,
                           int64_t hidden_size) {
  return DeviceOps::For(device.type()).SlowPathReason(device, hidden, weight, hidden_size);
}

int64_t CacheableRows(int64_t keep_logits, at::ScalarType hidden, at::ScalarType weight,
                      int64_t weight_rows, int64_t budget_bytes) {
  return CachedRowsWithin(budget_bytes, static_cast<LogitCacheKind>(keep_logits),
                          WideDtype(hidden, weight), weight_rows);
}

// Shapes for tracing. Sizes may be symbolic.

LinearLogprobOutputs OutputShapes(const LinearLogprobInputs& inputs,
                                  const LinearLogprobOptions& options) {
  const auto wide = WideDtype(inputs.hidden.scalar_type(), inputs.weight.scalar_type());
  LinearLogprobOutputs outputs;
  for (const RowOutput& output : kRowOutputs) {
    const auto type = inputs.target.options().dtype(output.is_id ? at::kLong : wide);
    std::vector<c10::SymInt> shape = inputs.target.sym_sizes().vec();
    if (output.width != nullptr) shape.emplace_back(options.*output.width);
    if (!output.IsRequested(options)) shape = {0};
    outputs.*output.member = at::empty_symint(shape, type);
  }
  const auto scores = outputs.logprob.options();
  outputs.candidate_logprobs = inputs.candidate_ids.has_value()
                                   ? at::empty_symint(inputs.candidate_ids->sym_sizes(), scores)
                                   : at::empty({0}, scores);
  outputs.cache = EmptyLogitCache(inputs, options);
  return outputs;
}

Outputs ScoreShapes(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                    const MaybeTensor& weight_grad) {
  // A call in which only some tensors are on the meta device is dispatched to this function.
  CheckDevices(inputs, weight_grad);
  CheckWeightGrad(weight_grad, inputs.weight);
  return ToTuple(OutputShapes(inputs, options));
}

Gradients DifferentiateShapes(const UpstreamGradients& /*upstream*/, const SavedOutputs& /*saved*/,
                              const LinearLogprobInputs& inputs,
                              const LinearLogprobOptions& /*options*/, Needs needs) {
  return GradientShapes(inputs.hidden, inputs.weight, inputs.bias, needs);
}

HiddenAndBiasGradients DifferentiateIntoShapes(const UpstreamGradients& /*upstream*/,
                                               const SavedOutputs& /*saved*/,
                                               const LinearLogprobInputs& inputs,
                                               const LinearLogprobOptions& /*options*/, Needs needs,
                                               Tensor& /*weight_grad*/) {
  const auto [d_hidden, d_weight, d_bias] =
      GradientShapes(inputs.hidden, inputs.weight, inputs.bias, {needs[0], false, needs[2]});
  return {d_hidden, d_bias};
}

LossOutputs LossShapes(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                       const LossCoefficients& coefficients, Needs needs, int64_t /*cache_bytes*/) {
  CheckDevices(inputs, std::nullopt);
  CheckCoefficients(coefficients, inputs);
  LinearLogprobOptions uncached = options;
  uncached.keep_logits = LogitCacheKind::kNone;
  const LinearLogprobOutputs outputs = OutputShapes(inputs, uncached);
  return ToLossOutputs(at::empty({}, outputs.logprob.options()), outputs,
                       GradientShapes(inputs.hidden, inputs.weight, inputs.bias, needs));
}

void NoScaling(Tensor& /*gradient*/, const Tensor& /*factor*/) {}

// Registration.

void RegisterKernels(torch::Library& library) {
  library.impl("linear_logprob", ScoreOperator::Kernel<&Score>());
  library.impl("linear_logprob_backward", BackwardOperator::Kernel<&Differentiate>());
  library.impl("linear_logprob_backward_into", BackwardIntoOperator::Kernel<&DifferentiateInto>());
  library.impl("linear_logprob_loss", LossOperator::Kernel<&Loss>());
  library.impl("scale_gradient_", &ScaleGradient);
}

TORCH_LIBRARY(logprobd, library) {
  library.def("free_bytes(int device, int enough) -> int", &FreeBytes);
  library.def("are_saved_tensors_hooked() -> bool", &AreSavedTensorsHooked);
  library.def(
      "is_fused(Device device, ScalarType hidden_dtype, ScalarType weight_dtype, "
      "int hidden_size) -> bool",
      &IsFused);
  library.def(
      "slow_path_reason(Device device, ScalarType hidden_dtype, ScalarType weight_dtype, "
      "int hidden_size) -> str",
      &SlowPathReason);
  library.def(
      "cacheable_rows(int keep_logits, ScalarType hidden_dtype, ScalarType weight_dtype, "
      "int weight_rows, int budget_bytes) -> int",
      &CacheableRows);
  const std::string call = Declare<LinearLogprobInputs>() + ", " + Declare<LinearLogprobOptions>();
  const std::string backward =
      Declare<UpstreamGradients>() + ", " + Declare<SavedOutputs>() + ", " + call;
  const auto define = [&](const std::string& schema) { library.def(schema.c_str()); };
  define("linear_logprob(" + call + ", Tensor? weight_grad) -> (" +
         Declare<LinearLogprobOutputs>() + ")");
  define("linear_logprob_backward(" + backward + ", bool[3] needs) -> (" +
         Declare<InputGradients>() + ")");
  define("linear_logprob_backward_into(" + backward +
         ", bool[3] needs, Tensor(a!) weight_grad) -> (Tensor d_hidden, Tensor d_bias)");
  define("linear_logprob_loss(" + call + ", " + Declare<LossCoefficients>() +
         ", bool[3] needs, int cache_bytes) -> (Tensor loss, " +
         Declare(LinearLogprobOutputs::Scores()) + ", " + Declare<InputGradients>() + ")");
  define("scale_gradient_(Tensor(a!) gradient, Tensor factor) -> ()");
}

TORCH_LIBRARY_IMPL(logprobd, CPU, library) { RegisterKernels(library); }
TORCH_LIBRARY_IMPL(logprobd, CUDA, library) { RegisterKernels(library); }

TORCH_LIBRARY_IMPL(logprobd, Meta, library) {
  library.impl("linear_logprob", ScoreOperator::Kernel<&ScoreShapes>());
  library.impl("linear_logprob_backward", BackwardOperator::Kernel<&DifferentiateShapes>());
  library.impl("linear_logprob_backward_into",
               BackwardIntoOperator::Kernel<&DifferentiateIntoShapes>());
  library.impl("linear_logprob_loss", LossOperator::Kernel<&LossShapes>());
  library.impl("scale_gradient_", &NoScaling);
}

}  // namespace

Gradients GradientShapes(const Tensor& hidden, const Tensor& weight, const MaybeTensor& bias,
                         Needs needs) {
  const auto shape = [](const Tensor& input, bool is_needed) {
    return is_needed ? at::empty_symint(input.sym_sizes(), input.options())
                     : at::empty({0}, input.options());
  };
  return {shape(hidden, needs[0]), shape(weight, needs[1]),
          shape(bias.value_or(weight), needs[2] && bias.has_value())};
}

}  // namespace logprobd::torch_ops
