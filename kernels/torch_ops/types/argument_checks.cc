#include "kernels/torch_ops/types/argument_checks.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

#include "kernels/common/logit_key.h"

namespace logprobd::torch_ops {
namespace {

bool IsDtypeSupported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
         dtype == at::kDouble;
}

void CheckRowTemperature(const at::Tensor& temperature, const at::Tensor& target,
                         int64_t ignore_index) {
  TORCH_CHECK_VALUE(temperature.sizes() == target.sizes(), "temperature has the shape ",
                    temperature.sizes(), " but target has the shape ", target.sizes(),
                    ": temperature must be one number or have one element per row");
  CheckRowTemperatures(temperature,
                       temperature.is_cpu() ? target.to(at::kLong) != ignore_index : at::Tensor());
}

/// Checks that ids are integers that fit in int64. Larger ones could become ignore_index.
void CheckIds(const at::Tensor& ids, const char* name) {
  const at::ScalarType type = ids.scalar_type();
  TORCH_CHECK_VALUE(at::isIntegralType(type, /*includeBool=*/false) && type != at::kUInt64, name,
                    " is ", type, ": it must hold integers, such as int64, but not uint64");
}

void CheckRows(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
               int64_t num_ranks) {
  const at::Tensor& hidden = inputs.hidden;
  const at::Tensor& target = inputs.target;
  if (options.parallel.sequence_parallel) {
    const int64_t hidden_rows = hidden.numel() / hidden.size(-1);
    TORCH_CHECK_VALUE(target.numel() == hidden_rows * num_ranks, "target has ", target.numel(),
                      " elements but hidden has ", hidden_rows, " rows on each of ", num_ranks,
                      " ranks: target must have one element for each row of all ranks");
  } else {
    TORCH_CHECK_VALUE(target.sizes() == hidden.sizes().slice(0, hidden.sizes().size() - 1),
                      "target has the shape ", target.sizes(), " but hidden has the shape ",
                      hidden.sizes(), ": target must have the shape of hidden without its last ",
                      "dimension");
  }
}

void CheckCandidates(const LinearLogprobInputs& inputs) {
  const at::Tensor& target = inputs.target;
  if (!inputs.candidate_ids.has_value()) {
    TORCH_CHECK_VALUE(!inputs.candidate_offsets.has_value(),
                      "candidate_offsets is given without candidate_ids: pass both");
    return;
  }
  const at::Tensor& ids = *inputs.candidate_ids;
  CheckIds(ids, "candidate_ids");
  TORCH_CHECK_VALUE(ids.numel() <= std::numeric_limits<int32_t>::max(), "candidate_ids has ",
                    ids.numel(), " elements: at most ", std::numeric_limits<int32_t>::max(),
                    " are supported");
  if (!inputs.candidate_offsets.has_value()) {
    TORCH_CHECK_VALUE(ids.dim() == target.dim() + 1 &&
                          ids.sizes().slice(0, target.sizes().size()) == target.sizes(),
                      "candidate_ids has the shape ", ids.sizes(), " but target has the shape ",
                      target.sizes(),
                      ": without candidate_offsets it must have one more dimension than target");
    return;
  }
  const at::Tensor& offsets = *inputs.candidate_offsets;
  CheckIds(offsets, "candidate_offsets");
  TORCH_CHECK_VALUE(ids.dim() == 1, "candidate_ids has the shape ", ids.sizes(),
                    ": with candidate_offsets it must have one dimension");
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.size(0) == target.numel() + 1,
                    "candidate_offsets has the shape ", offsets.sizes(), " but target has ",
                    target.numel(), " elements: the shape must be [", target.numel() + 1, "]");
}

void CheckOptions(const LinearLogprobOptions& options) {
  CheckTemperature(options.temperature);
  CheckSoftcap(/*prefix=*/"", options.softcap);
  TORCH_CHECK_VALUE(options.memory.keep_logits >= LogitCacheKind::kNone &&
                        options.memory.keep_logits <= LogitCacheKind::kExponentials,
                    "keep_logits is ", static_cast<int64_t>(options.memory.keep_logits),
                    ": it must be 0, 1 or 2");
  TORCH_CHECK_VALUE(options.memory.cached_rows >= -1, "cached_rows is ", options.memory.cached_rows,
                    ": it must be a number of rows, or -1 for all");
  TORCH_CHECK_VALUE(options.hidden_splits == 2 || options.hidden_splits == 3, "hidden_splits is ",
                    options.hidden_splits, ": it must be 2 or 3");
  TORCH_CHECK_VALUE(options.top_k >= 0 && options.top_k <= kernels::kTopKMax, "top_k is ",
                    options.top_k, ": it must be from 0 to ", kernels::kTopKMax);
  TORCH_CHECK_VALUE(options.parallel.vocab_start >= 0, "vocab_start is ",
                    options.parallel.vocab_start, ": it must not be negative");
  TORCH_CHECK_VALUE(options.parallel.vocab_valid == -1 || options.parallel.vocab_valid > 0,
                    "vocab_valid is ", options.parallel.vocab_valid,
                    ": it must be above 0, or None for the whole vocabulary");
}

}  // namespace

void CheckOnDevice(const MaybeTensor& tensor, const char* name, const at::Tensor& reference,
                   const char* reference_name) {
  TORCH_CHECK_VALUE(!tensor.has_value() || tensor->device() == reference.device(), name, " is on ",
                    tensor->device(), ", but ", reference_name, " is on ", reference.device(),
                    ": both must be on the same device");
}

void CheckFloatingPoint(const MaybeTensor& tensor, const std::string& name) {
  TORCH_CHECK_VALUE(!tensor.has_value() || tensor->is_floating_point(), name, " is ",
                    tensor->scalar_type(), ": it must have a floating-point dtype");
}

void CheckHead(const std::string& prefix, const at::Tensor& hidden, const at::Tensor& weight,
               int64_t rows_min) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) >= rows_min && weight.size(1) > 0, prefix,
                    "weight has the shape ", weight.sizes(),
                    ": it must be [vocabulary, hidden size] and complete; gather the weight "
                    "first when its parameters are sharded");
  TORCH_CHECK_VALUE(hidden.dim() >= 1 && hidden.size(-1) == weight.size(1), prefix,
                    "hidden has the shape ", hidden.sizes(), " but ", prefix,
                    "weight has the shape ", weight.sizes(),
                    ": their last dimensions must be equal");
  TORCH_CHECK_VALUE(
      IsDtypeSupported(hidden.scalar_type()) && IsDtypeSupported(weight.scalar_type()), prefix,
      "hidden is ", hidden.scalar_type(), " and ", prefix, "weight is ", weight.scalar_type(),
      ": float32, bfloat16, float16 and float64 are supported");
}

void CheckPerColumn(const std::string& prefix, const char* name, const MaybeTensor& tensor,
                    const at::Tensor& weight) {
  if (!tensor.has_value()) return;
  TORCH_CHECK_VALUE(tensor->dim() == 1 && tensor->size(0) == weight.size(0), prefix, name,
                    " has the shape ", tensor->sizes(), " but ", prefix, "weight has ",
                    weight.size(0), " rows: the shape must be [", weight.size(0), "]");
  CheckFloatingPoint(tensor, prefix + name);
}

void CheckSoftcap(const std::string& prefix, double softcap) {
  TORCH_CHECK_VALUE(softcap >= 0 && std::isfinite(softcap), prefix, "softcap is ", softcap,
                    ": it must be above 0, or None for no cap");
}

void CheckTemperature(double temperature) {
  TORCH_CHECK_VALUE(temperature > 0 && std::isfinite(temperature), "temperature is ", temperature,
                    ": it must be above 0 and finite");
}

void CheckRowTemperatures(const at::Tensor& temperatures, const at::Tensor& is_computed) {
  CheckFloatingPoint(temperatures, "temperature");
  // Reading a value on a GPU would wait for the GPU.
  if (!temperatures.is_cpu()) return;
  at::Tensor is_bad = temperatures.gt(0).logical_and_(temperatures.isfinite()).logical_not_();
  if (is_computed.defined()) is_bad.logical_and_(is_computed);
  if (!is_bad.any().item<bool>()) return;
  const auto row = is_bad.reshape({-1}).to(at::kByte).argmax().item<int64_t>();
  TORCH_CHECK_VALUE(false, "temperature of row ", row, " is ",
                    temperatures.reshape({-1})[row].item<double>(),
                    ": it must be above 0 and finite, except in rows that are ignored");
}

void WarnOfSlowInputs(const std::string& message) {
  static std::mutex mutex;
  static std::set<std::string> known;
  {
    const std::lock_guard lock(mutex);
    if (!known.insert(message).second) return;
  }
  TORCH_WARN(message);
}

void CheckDevices(const LinearLogprobInputs& inputs, const MaybeTensor& weight_grad) {
  CheckOnDevice(weight_grad, "weight_grad", inputs.hidden, "hidden");
  ForEachField<LinearLogprobInputs>([&](const auto& field) {
    const bool is_temperature = std::string_view(field.name) == "row_temperature";
    CheckOnDevice(field.In(inputs), is_temperature ? "temperature" : field.name, inputs.hidden,
                  "hidden");
  });
}

void CheckWeightGrad(const MaybeTensor& weight_grad, const at::Tensor& weight) {
  if (!weight_grad.has_value()) return;
  TORCH_CHECK_VALUE(weight_grad->sym_sizes() == weight.sym_sizes(), "weight_grad has the shape ",
                    weight_grad->sym_sizes(), " but weight has the shape ", weight.sym_sizes(),
                    ": the shapes must be equal");
  TORCH_CHECK_VALUE(weight_grad->scalar_type() == at::kFloat, "weight_grad is ",
                    weight_grad->scalar_type(), ": it must be float32");
  TORCH_CHECK_VALUE(
      at::has_internal_overlap(*weight_grad) != at::MemOverlap::Yes,
      "weight_grad has elements that share memory: pass a tensor that is not expanded");
}

void CheckArguments(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                    int64_t num_ranks) {
  const at::Tensor& weight = inputs.weight;
  // A rank may have no row of the weight.
  CheckHead(/*prefix=*/"", inputs.hidden, weight, /*rows_min=*/0);
  CheckIds(inputs.target, "target");
  CheckRows(inputs, options, num_ranks);
  CheckDevices(inputs, /*weight_grad=*/std::nullopt);
  CheckPerColumn(/*prefix=*/"", "bias", inputs.bias, weight);
  CheckPerColumn(/*prefix=*/"", "mean_logit_weights", inputs.mean_logit_weights, weight);
  if (inputs.row_temperature.has_value()) {
    CheckRowTemperature(*inputs.row_temperature, inputs.target, options.ignore_index);
  }
  CheckCandidates(inputs);
  CheckOptions(options);
  TORCH_CHECK_VALUE(weight.size(0) > 0 || num_ranks > 1,
                    "weight has no rows: gather the weight first when its parameters are sharded");
  TORCH_CHECK_VALUE(!options.parallel.sequence_parallel || !options.parallel.group.empty(),
                    "sequence_parallel needs a process_group from which to gather hidden");
  TORCH_CHECK_VALUE(
      !options.parallel.sequence_parallel || !options.parallel.partial_hidden_gradient,
      "hidden_gradient is \"partial\" but sequence_parallel is set: the partial "
      "gradient has the rows of all ranks, which hidden has not; use \"sum\"");
}

void CheckCoefficients(const LossCoefficients& coefficients, const LinearLogprobInputs& inputs) {
  bool has_any = false;
  for (const LossScore& score : kLossScores) {
    const char* const name = score.name;
    const auto& [tensor, factor] = coefficients.*score.coefficient;
    TORCH_CHECK_VALUE(std::isfinite(factor), name, " is ", factor, ": it must be finite");
    has_any = has_any || factor != 0;
    if (!tensor.has_value()) continue;
    TORCH_CHECK_VALUE(tensor->sym_sizes() == inputs.target.sym_sizes(), name, " has the shape ",
                      tensor->sym_sizes(), " but target has the shape ", inputs.target.sym_sizes(),
                      ": the shapes must be equal");
    CheckFloatingPoint(tensor, name);
    CheckOnDevice(tensor, name, inputs.hidden, "hidden");
  }
  TORCH_CHECK_VALUE(
      has_any,
      "logprob_coef, entropy_coef, lse_coef and mean_logit_coef are all 0: at least one of "
      "them must not be 0");
}

}  // namespace logprobd::torch_ops
