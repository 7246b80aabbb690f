#include "kernels/torch_ops/api/problem.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/common/logit_key.h"
#include "kernels/torch_ops/api/argument_checks.h"
#include "kernels/torch_ops/paths/scoring_path.h"
#include "kernels/torch_ops/rows/device_ops.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {
namespace {

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
               const RankGroup& group) {
  const at::Tensor& hidden = inputs.hidden;
  const at::Tensor& target = inputs.target;
  if (options.sequence_parallel) {
    const int64_t hidden_rows = hidden.numel() / hidden.size(-1);
    TORCH_CHECK_VALUE(target.numel() == hidden_rows * group.size(), "target has ", target.numel(),
                      " elements but hidden has ", hidden_rows, " rows on each of ", group.size(),
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
  TORCH_CHECK_VALUE(options.keep_logits >= LogitCacheKind::kNone &&
                        options.keep_logits <= LogitCacheKind::kExponentials,
                    "keep_logits is ", static_cast<int64_t>(options.keep_logits),
                    ": it must be 0, 1 or 2");
  TORCH_CHECK_VALUE(options.cached_rows >= -1, "cached_rows is ", options.cached_rows,
                    ": it must be a number of rows, or -1 for all");
  TORCH_CHECK_VALUE(options.hidden_splits == 2 || options.hidden_splits == 3, "hidden_splits is ",
                    options.hidden_splits, ": it must be 2 or 3");
  TORCH_CHECK_VALUE(options.top_k >= 0 && options.top_k <= kernels::kTopKMax, "top_k is ",
                    options.top_k, ": it must be from 0 to ", kernels::kTopKMax);
  TORCH_CHECK_VALUE(options.vocab_start >= 0, "vocab_start is ", options.vocab_start,
                    ": it must not be negative");
  TORCH_CHECK_VALUE(options.vocab_valid == -1 || options.vocab_valid > 0, "vocab_valid is ",
                    options.vocab_valid, ": it must be above 0, or None for the whole vocabulary");
}

}  // namespace

at::ScalarType WideDtype(at::ScalarType hidden, at::ScalarType weight) {
  return hidden == at::kDouble || weight == at::kDouble ? at::kDouble : at::kFloat;
}

void CheckDevices(const LinearLogprobInputs& inputs, const MaybeTensor& weight_grad) {
  const auto check = [&](const MaybeTensor& tensor, const char* name) {
    CheckOnDevice(tensor, name, inputs.hidden, "hidden");
  };
  check(weight_grad, "weight_grad");
  check(inputs.weight, "weight");
  check(inputs.target, "target");
  check(inputs.bias, "bias");
  check(inputs.row_temperature, "temperature");
  check(inputs.mean_logit_weights, "mean_logit_weights");
  check(inputs.candidate_ids, "candidate_ids");
  check(inputs.candidate_offsets, "candidate_offsets");
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
                    const RankGroup& group) {
  const at::Tensor& weight = inputs.weight;
  // A rank may have no row of the weight.
  CheckHead(/*prefix=*/"", inputs.hidden, weight, /*rows_min=*/0);
  CheckIds(inputs.target, "target");
  CheckRows(inputs, options, group);
  CheckDevices(inputs, /*weight_grad=*/std::nullopt);
  CheckPerColumn(/*prefix=*/"", "bias", inputs.bias, weight);
  CheckPerColumn(/*prefix=*/"", "mean_logit_weights", inputs.mean_logit_weights, weight);
  if (inputs.row_temperature.has_value()) {
    CheckRowTemperature(*inputs.row_temperature, inputs.target, options.ignore_index);
  }
  CheckCandidates(inputs);
  CheckOptions(options);
  TORCH_CHECK_VALUE(weight.size(0) > 0 || !group.is_alone(),
                    "weight has no rows: gather the weight first when its parameters are sharded");
  TORCH_CHECK_VALUE(!options.sequence_parallel || !options.group.empty(),
                    "sequence_parallel needs a process_group from which to gather hidden");
  TORCH_CHECK_VALUE(!options.sequence_parallel || !options.partial_hidden_gradient,
                    "hidden_gradient is \"partial\" but sequence_parallel is set: the partial "
                    "gradient has the rows of all ranks, which hidden has not; use \"sum\"");
}

Problem::Problem(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options)
    : inputs(inputs),
      options(options),
      group(options.group),
      wide(WideDtype(inputs.hidden.scalar_type(), inputs.weight.scalar_type())),
      device_ops(&DeviceOps::For(inputs.hidden.device().type())) {
  // With one rank, hidden has all rows.
  if (group.is_alone()) this->options.sequence_parallel = false;
  TORCH_CHECK_VALUE(group.is_alone() || !device_ops->IsCapturing(device()), "process_group has ",
                    group.size(),
                    " ranks: a CUDA graph can capture only calls without a group, or with one of "
                    "one rank, because the ranks exchange information on the host");
}

void Problem::Plan() {
  path = &ChoosePath(*this);
  const int64_t weight_end = ShardIds(inputs, options).end;
  shard = Shard(inputs, options,
                group.is_alone() ? weight_end : std::max(weight_end, options.vocab_valid));
  at::Tensor& hidden = inputs.hidden;
  if (hidden.dim() != 2) hidden = hidden.reshape({-1, hidden.size(-1)});
  inputs.target = inputs.target.to(at::kLong).contiguous();
  // The temperature of an ignored row may be 0 or NaN. It is replaced where it would be read: in a
  // CUDA graph, which computes all rows, and in the gradients of lists.
  const bool reads_ignored_rows =
      device_ops->IsCapturing(device()) || options.top_k > 0 || inputs.candidate_ids.has_value();
  if (inputs.row_temperature.has_value() && reads_ignored_rows) {
    inputs.row_temperature =
        at::where(inputs.target == options.ignore_index, 1, *inputs.row_temperature);
  }
  if (options.sequence_parallel) {
    hidden = hidden.contiguous();
    gathered_hidden = at::empty({num_rows(), hidden_size()}, hidden.options());
  }
  path->AlignInputs(inputs);
}

Problem Problem::ForRows(const Rows& rows) const {
  Problem part = *this;
  part.inputs.hidden = rows.hidden;
  part.inputs.target = rows.target();
  if (rows.temperature.defined()) part.inputs.row_temperature = rows.temperature;
  return part;
}

}  // namespace logprobd::torch_ops
