// Registers torch.ops.logprobd.*: schemas, kernels for CPU and CUDA, and shapes for tracing.

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/torch_ops/ops/divergence.h"
#include "kernels/torch_ops/ops/linear_logprob.h"
#include "kernels/torch_ops/ops/loss.h"
#include "kernels/torch_ops/ops/signatures.h"
#include "kernels/torch_ops/paths/logit_cache.h"
#include "kernels/torch_ops/paths/row_divergence.h"
#include "kernels/torch_ops/paths/scoring_path.h"
#include "kernels/torch_ops/rows/device_ops.h"
#include "kernels/torch_ops/types/argument_checks.h"

namespace logprobd::torch_ops {
namespace {

using at::Tensor;

InputGradients BackwardAlone(const UpstreamGradients& upstream, const SavedOutputs& saved,
                             const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                             GradientNeeds needs) {
  return Backward(/*weight_grad=*/std::nullopt, upstream, saved, inputs, options, needs);
}

// Queries.

int64_t FreeBytes(int64_t device, int64_t enough) {
  return DeviceOps::For(at::kCUDA).FreeBytes(device, enough);
}

bool AreSavedTensorsHooked() { return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty(); }

bool IsFused(at::Device device, at::ScalarType hidden, at::ScalarType weight, int64_t hidden_size) {
  return GetFusedPath(device, hidden, weight, hidden_size) != nullptr;
}

int64_t CacheableRows(int64_t keep_logits, at::ScalarType hidden, at::ScalarType weight,
                      int64_t weight_rows, int64_t budget_bytes) {
  return CachedRowsWithin(budget_bytes, static_cast<LogitCacheKind>(keep_logits),
                          WideDtype(hidden, weight), weight_rows);
}

/// Returns the members of DivergenceRowBytes.
std::tuple<int64_t, int64_t, int64_t> RowBytes(at::Device device, at::ScalarType hidden,
                                               at::ScalarType weight, at::ScalarType teacher_hidden,
                                               at::ScalarType teacher_weight, int64_t columns) {
  const at::ScalarType wide =
      WideDtype(WideDtype(hidden, weight), WideDtype(teacher_hidden, teacher_weight));
  const DivergenceRowBytes bytes = RowBytesOf(device, hidden, weight, wide, columns);
  return {bytes.logits, bytes.gradient, static_cast<int64_t>(bytes.cache_kind)};
}

// Shapes for tracing. Sizes may be symbolic. A call in which only some tensors are on the meta
// device is dispatched to these functions.

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

LinearLogprobOutputs ScoreShapes(const LinearLogprobInputs& inputs,
                                 const LinearLogprobOptions& options,
                                 const MaybeTensor& weight_grad) {
  CheckDevices(inputs, weight_grad);
  CheckWeightGrad(weight_grad, inputs.weight);
  return OutputShapes(inputs, options);
}

InputGradients BackwardShapes(const UpstreamGradients& /*upstream*/, const SavedOutputs& /*saved*/,
                              const LinearLogprobInputs& inputs,
                              const LinearLogprobOptions& /*options*/, GradientNeeds needs) {
  return EmptyGradients(inputs.hidden, inputs.weight, inputs.bias, needs);
}

InputGradients BackwardIntoShapes(Tensor& /*weight_grad*/, const UpstreamGradients& /*upstream*/,
                                  const SavedOutputs& /*saved*/, const LinearLogprobInputs& inputs,
                                  const LinearLogprobOptions& /*options*/, GradientNeeds needs) {
  needs.weight = false;
  return EmptyGradients(inputs.hidden, inputs.weight, inputs.bias, needs);
}

LinearLogprobLoss LossShapes(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                             const LossCoefficients& coefficients, GradientNeeds needs,
                             int64_t /*cache_bytes*/) {
  CheckDevices(inputs, std::nullopt);
  CheckCoefficients(coefficients, inputs);
  LinearLogprobOptions uncached = options;
  uncached.memory.keep_logits = LogitCacheKind::kNone;
  LinearLogprobLoss result;
  result.scores = OutputShapes(inputs, uncached);
  result.loss = at::empty({}, result.scores.logprob.options());
  result.gradients = EmptyGradients(inputs.hidden, inputs.weight, inputs.bias, needs);
  return result;
}

void NoScaling(Tensor& /*gradient*/, const Tensor& /*factor*/) {}

DivergenceOutputs DivergenceShapes(const DivergenceInputs& inputs,
                                   const DivergenceOptions& options) {
  CheckDevices(inputs);
  const Tensor& hidden = inputs.student_hidden;
  const auto wide = hidden.options().dtype(WideDtype(inputs));
  const auto sizes = hidden.sym_sizes();
  const auto rows = sizes.slice(0, sizes.size() - 1);
  c10::SymInt num_rows = 1;
  for (const c10::SymInt& size : rows) num_rows = num_rows * size;
  DivergenceOutputs outputs;
  outputs.divergence = at::empty_symint(rows, wide);
  outputs.entropy = at::empty_symint(rows, wide);
  outputs.statistics =
      at::empty_symint({num_rows, int64_t{kNumStatistics}}, wide.dtype(at::kDouble));
  const c10::SymInt columns = options.vocab_valid > 0 ? c10::SymInt(options.vocab_valid)
                                                      : inputs.student_weight.sym_size(0);
  const bool is_narrow = options.keep_gradient == GradientCacheKind::kSixteenBits;
  outputs.cache = options.keep_gradient == GradientCacheKind::kNone
                      ? at::empty({0}, wide)
                      : at::empty_symint({num_rows, GradientPitch(columns)},
                                         is_narrow ? inputs.student_weight.options() : wide);
  return outputs;
}

InputGradients StudentShapes(const DivergenceInputs& inputs, GradientNeeds needs) {
  return EmptyGradients(inputs.student_hidden, inputs.student_weight, inputs.student_bias, needs);
}

InputGradients DivergenceBackwardShapes(const DivergenceUpstream& /*upstream*/,
                                        const DivergenceInputs& inputs,
                                        const DivergenceOptions& /*options*/, GradientNeeds needs) {
  return StudentShapes(inputs, needs);
}

DivergenceLoss DivergenceLossShapes(const DivergenceInputs& inputs,
                                    const DivergenceOptions& options,
                                    const MaybeTensor& /*row_weights*/, bool /*is_mean*/,
                                    GradientNeeds needs) {
  DivergenceOptions uncached = options;
  uncached.keep_gradient = GradientCacheKind::kNone;
  const DivergenceOutputs rows = DivergenceShapes(inputs, uncached);
  return {at::empty({}, rows.divergence.options()), rows.divergence, rows.entropy,
          StudentShapes(inputs, needs)};
}

// Registration.

TORCH_LIBRARY(logprobd, library) {
  library.def("free_bytes(int device, *, int enough) -> int", &FreeBytes);
  library.def("are_saved_tensors_hooked() -> bool", &AreSavedTensorsHooked);
  library.def(
      "is_fused(Device device, *, ScalarType hidden_dtype, ScalarType weight_dtype, "
      "int hidden_size) -> bool",
      &IsFused);
  library.def(
      "slow_path_reason(Device device, *, ScalarType hidden_dtype, ScalarType weight_dtype, "
      "int hidden_size) -> str",
      &SlowPathReason);
  library.def(
      "cacheable_rows(*, int keep_logits, ScalarType hidden_dtype, ScalarType weight_dtype, "
      "int weight_rows, int budget_bytes) -> int",
      &CacheableRows);
  library.def(
      "divergence_row_bytes(Device device, *, ScalarType hidden_dtype, ScalarType weight_dtype, "
      "ScalarType teacher_hidden_dtype, ScalarType teacher_weight_dtype, int columns) -> "
      "(int logits, int gradient, int cache_kind)",
      &RowBytes);
  ScoreOperator::Define(library, {"weight_grad"});
  BackwardOperator::Define(library);
  BackwardIntoOperator::Define(library, {"weight_grad"});
  LossOperator::Define(library, {"cache_bytes"});
  ScaleGradientOperator::Define(library, {"gradient", "factor"});
  DivergenceOperator::Define(library);
  DivergenceBackwardOperator::Define(library);
  DivergenceLossOperator::Define(library, {"row_weights", "is_mean"});
}

void RegisterKernels(torch::Library& library) {
  ScoreOperator::Register<&Forward>(library);
  BackwardOperator::Register<&BackwardAlone>(library);
  BackwardIntoOperator::Register<&Backward>(library);
  LossOperator::Register<&ForwardWithGradients>(library);
  ScaleGradientOperator::Register<&ScaleGradient>(library);
  DivergenceOperator::Register<&ForwardDivergence>(library);
  DivergenceBackwardOperator::Register<&BackwardDivergence>(library);
  DivergenceLossOperator::Register<&ForwardDivergenceLoss>(library);
}

TORCH_LIBRARY_IMPL(logprobd, CPU, library) { RegisterKernels(library); }
TORCH_LIBRARY_IMPL(logprobd, CUDA, library) { RegisterKernels(library); }

TORCH_LIBRARY_IMPL(logprobd, Meta, library) {
  ScoreOperator::Register<&ScoreShapes>(library);
  BackwardOperator::Register<&BackwardShapes>(library);
  BackwardIntoOperator::Register<&BackwardIntoShapes>(library);
  LossOperator::Register<&LossShapes>(library);
  ScaleGradientOperator::Register<&NoScaling>(library);
  DivergenceOperator::Register<&DivergenceShapes>(library);
  DivergenceBackwardOperator::Register<&DivergenceBackwardShapes>(library);
  DivergenceLossOperator::Register<&DivergenceLossShapes>(library);
}

}  // namespace

std::string internal::SchemaText(const char* name, const std::vector<std::string>& arguments,
                                 const std::vector<std::string>& results) {
  std::string text = std::string(name) + "(";
  const char* separator = "";
  bool is_keyword_only = false;
  for (const std::string& argument : arguments) {
    const bool is_tensor = argument.starts_with("Tensor ") || argument.starts_with("Tensor(");
    if (!is_tensor && !std::exchange(is_keyword_only, true)) {
      text += std::exchange(separator, ", ") + std::string("*");
    }
    text += std::exchange(separator, ", ") + argument;
  }
  text += ") -> (";
  separator = "";
  for (const std::string& result : results) text += std::exchange(separator, ", ") + result;
  return text + ")";
}

}  // namespace logprobd::torch_ops
