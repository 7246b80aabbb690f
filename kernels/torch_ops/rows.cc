#include "kernels/torch_ops/rows.h"

#include <ATen/ops/nonzero.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

namespace logprobd::torch_ops {
namespace {

bool IsDtypeServed(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
         dtype == at::kDouble;
}

void CheckOnDevice(const std::optional<at::Tensor>& tensor, const char* name,
                   const at::Tensor& hidden) {
  TORCH_CHECK_VALUE(!tensor.has_value() || tensor->device() == hidden.device(), name, " is on ",
                    tensor->device(), " and hidden on ", hidden.device());
}

void CheckPerColumn(const std::optional<at::Tensor>& tensor, const char* name,
                    const at::Tensor& weight) {
  TORCH_CHECK_VALUE(
      !tensor.has_value() || (tensor->dim() == 1 && tensor->size(0) == weight.size(0)), name,
      " has the shape ", tensor->sizes(), ", and weight ", weight.size(0), " rows: it must be [",
      weight.size(0), "]");
}

}  // namespace

at::Tensor Rows::Spread(const at::Tensor& values) const {
  if (!index.defined()) return values;
  std::vector<int64_t> shape = values.sizes().vec();
  shape.front() = num_all;
  return at::zeros(shape, values.options()).index_copy_(0, index, values);
}

at::Tensor Rows::Select(const at::Tensor& values) const {
  return index.defined() ? values.index_select(0, index) : values;
}

void CheckArguments(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                    const RankGroup& group) {
  const at::Tensor& hidden = inputs.hidden;
  const at::Tensor& weight = inputs.weight;
  const at::Tensor& target = inputs.target;
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) > 0, "weight has the shape ",
                    weight.sizes(),
                    ": it must be [vocabulary, hidden size], and whole: gather it "
                    "first where it is sharded by parameters");
  TORCH_CHECK_VALUE(hidden.dim() >= 1 && hidden.size(-1) == weight.size(1), "hidden has the shape ",
                    hidden.sizes(), " and weight ", weight.sizes(),
                    ": their last sizes must be equal");
  TORCH_CHECK_VALUE(IsDtypeServed(hidden.scalar_type()) && IsDtypeServed(weight.scalar_type()),
                    "hidden is ", hidden.scalar_type(), " and weight ", weight.scalar_type(),
                    ": float32, bfloat16, float16 and float64 are served");
  TORCH_CHECK_VALUE(at::isIntegralType(target.scalar_type(), /*includeBool=*/false), "target is ",
                    target.scalar_type(), ": it must hold integers");
  const int64_t hidden_rows = hidden.numel() / hidden.size(-1);
  const int64_t ranks = options.sequence_parallel ? group.size() : 1;
  TORCH_CHECK_VALUE(target.numel() == hidden_rows * ranks, "target has ", target.numel(),
                    " elements and hidden ", hidden_rows, " rows",
                    options.sequence_parallel ? " on each rank of the group" : "",
                    ": there must be one for each");
  CheckOnDevice(inputs.weight, "weight", hidden);
  CheckOnDevice(inputs.target, "target", hidden);
  CheckOnDevice(inputs.bias, "bias", hidden);
  CheckOnDevice(inputs.row_temperature, "temperature", hidden);
  CheckOnDevice(inputs.column_weights, "column_weights", hidden);
  CheckPerColumn(inputs.bias, "bias", weight);
  CheckPerColumn(inputs.column_weights, "column_weights", weight);
  TORCH_CHECK_VALUE(
      !inputs.row_temperature.has_value() || inputs.row_temperature->sizes() == target.sizes(),
      "temperature has the shape ", inputs.row_temperature->sizes(), " and target ", target.sizes(),
      ": it must be one number or one a row");
  TORCH_CHECK_VALUE(options.temperature > 0, "temperature is ", options.temperature,
                    ": it must be above 0");
  TORCH_CHECK_VALUE(options.softcap >= 0, "softcap is ", options.softcap,
                    ": it must be above 0, or None for none");
  TORCH_CHECK_VALUE(options.vocab_start >= 0, "vocab_start is ", options.vocab_start,
                    ": it must not be negative");
  TORCH_CHECK_VALUE(options.vocab_valid == -1 || options.vocab_valid > 0, "vocab_valid is ",
                    options.vocab_valid, ": it must be above 0, or None for the whole vocabulary");
  TORCH_CHECK_VALUE(!options.sequence_parallel || !group.is_alone(),
                    "sequence_parallel needs a process_group to gather hidden from");
}

Rows RowsThatCount(const at::Tensor& hidden, const LinearLogprobInputs& inputs,
                   const LinearLogprobOptions& options, const at::Tensor& wanted) {
  Rows rows;
  rows.target = inputs.target.reshape({-1}).to(at::kLong);
  rows.num_all = rows.target.size(0);
  rows.hidden = hidden;
  if (inputs.row_temperature.has_value()) rows.temperature = inputs.row_temperature->reshape({-1});
  at::Tensor counts = rows.target != options.ignore_index;
  if (wanted.defined()) counts.logical_and_(wanted);
  const at::Tensor index = at::nonzero(counts).squeeze(1);
  if (index.size(0) < rows.num_all) {
    rows.index = index;
    rows.target = rows.target.index_select(0, index);
    rows.hidden = rows.hidden.index_select(0, index);
    if (rows.temperature.defined()) rows.temperature = rows.temperature.index_select(0, index);
  }
  return rows;
}

void CheckTargets(const Rows& rows, int64_t vocab_size) {
  const at::Tensor outside = rows.target.lt(0).logical_or_(rows.target.ge(vocab_size));
  const at::Tensor found = at::nonzero(outside).squeeze(1);
  if (found.size(0) == 0) return;
  const auto first = found[0].item<int64_t>();
  const auto place = rows.index.defined() ? rows.index[first].item<int64_t>() : first;
  TORCH_CHECK_INDEX(false, "target ", rows.target[first].item<int64_t>(), " of row ", place,
                    " is not in [0, ", vocab_size, "): ", found.size(0),
                    " targets are not; ignored ones hold ignore_index");
}

at::ScalarType WideType(const LinearLogprobInputs& inputs) {
  const bool is_double =
      inputs.hidden.scalar_type() == at::kDouble || inputs.weight.scalar_type() == at::kDouble;
  return is_double ? at::kDouble : at::kFloat;
}

}  // namespace logprobd::torch_ops
