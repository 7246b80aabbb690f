#include "kernels/torch_ops/rows.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <bit>
#include <cmath>

#include "kernels/torch_ops/fused_forward.h"
#include "kernels/torch_ops/views.h"

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
  TORCH_CHECK_VALUE(!tensor.has_value() || tensor->is_floating_point(), name, " is ",
                    tensor->scalar_type(), ": it must hold real numbers");
}

}  // namespace

void CheckDevices(const LinearLogprobInputs& inputs, const std::optional<at::Tensor>& weight_grad) {
  CheckOnDevice(weight_grad, "weight_grad", inputs.hidden);
  CheckOnDevice(inputs.weight, "weight", inputs.hidden);
  CheckOnDevice(inputs.target, "target", inputs.hidden);
  CheckOnDevice(inputs.bias, "bias", inputs.hidden);
  CheckOnDevice(inputs.row_temperature, "temperature", inputs.hidden);
  CheckOnDevice(inputs.mean_logit_weights, "mean_logit_weights", inputs.hidden);
}

at::Tensor Rows::Spread(const at::Tensor& values) const {
  if (!index.defined()) return values;
  std::vector<int64_t> shape = values.sizes().vec();
  shape.front() = num_all;
  return at::zeros(shape, values.options()).index_copy_(0, index, values);
}

Rows Rows::Part(int64_t begin, int64_t size) const {
  if (size == this->size()) return *this;
  // Which rows a part has is known when the search has ended.
  TORCH_INTERNAL_ASSERT(search == nullptr);
  Rows part;
  part.hidden = hidden.narrow(0, begin, size);
  part.all_targets = all_targets;
  if (temperature.defined()) part.temperature = temperature.narrow(0, begin, size);
  part.index = index.defined() ? index.narrow(0, begin, size)
                               : at::arange(begin, begin + size, all_targets.options());
  part.num_all = num_all;
  part.num_out_of_vocab = num_out_of_vocab;
  part.are_owned = are_owned;
  part.are_unchecked = are_unchecked;
  return part;
}

at::Tensor Rows::target() const { return Select(all_targets); }

Rows Rows::Resolved() const {
  if (search == nullptr) return *this;
  const RowSelection& found = search->Result();
  Rows rows = *this;
  rows.search.reset();
  rows.num_out_of_vocab = found.num_out_of_vocab;
  rows.index = found.index;
  if (!found.index.defined()) return rows;
  const int64_t count = found.index.size(0);
  rows.hidden = RowsFrom(hidden, 0, count);
  if (temperature.defined()) rows.temperature = RowsFrom(temperature, 0, count);
  return rows;
}

TargetPlaces FindTargets(const Rows& rows, int64_t first, int64_t count) {
  const at::Tensor column = rows.target() - first;
  return {column.clamp(0, count - 1), column.ge(0).logical_and_(column.lt(count))};
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
  if (options.sequence_parallel) {
    const int64_t hidden_rows = hidden.numel() / hidden.size(-1);
    TORCH_CHECK_VALUE(target.numel() == hidden_rows * group.size(), "target has ", target.numel(),
                      " elements and hidden ", hidden_rows, " rows on each of ", group.size(),
                      " ranks: there must be one for each row of all of them");
  } else {
    TORCH_CHECK_VALUE(target.sizes() == hidden.sizes().slice(0, hidden.sizes().size() - 1),
                      "target has the shape ", target.sizes(), " and hidden ", hidden.sizes(),
                      ": it must be hidden's without the last size");
  }
  CheckDevices(inputs, /*weight_grad=*/std::nullopt);
  CheckPerColumn(inputs.bias, "bias", weight);
  CheckPerColumn(inputs.mean_logit_weights, "mean_logit_weights", weight);
  TORCH_CHECK_VALUE(
      !inputs.row_temperature.has_value() || inputs.row_temperature->sizes() == target.sizes(),
      "temperature has the shape ", inputs.row_temperature->sizes(), " and target ", target.sizes(),
      ": it must be one number or one a row");
  if (inputs.row_temperature.has_value()) {
    TORCH_CHECK_VALUE(inputs.row_temperature->is_floating_point(), "temperature is ",
                      inputs.row_temperature->scalar_type(), ": it must hold real numbers");
    // On a GPU looking would wait for it.
    TORCH_CHECK_VALUE(
        !inputs.row_temperature->is_cpu() || inputs.row_temperature->gt(0).all().item<bool>(),
        "temperature has an element that is not above 0");
  }
  TORCH_CHECK_VALUE(options.temperature > 0 && std::isfinite(options.temperature),
                    "temperature is ", options.temperature, ": it must be above 0 and finite");
  TORCH_CHECK_VALUE(options.softcap >= 0 && std::isfinite(options.softcap), "softcap is ",
                    options.softcap, ": it must be above 0, or None for none");
  TORCH_CHECK_VALUE(options.keep_logits <= KeptLogits::kExponentials, "keep_logits is ",
                    static_cast<int64_t>(options.keep_logits), ": it must be 0, 1 or 2");
  TORCH_CHECK_VALUE(options.vocab_start >= 0, "vocab_start is ", options.vocab_start,
                    ": it must not be negative");
  TORCH_CHECK_VALUE(options.vocab_valid == -1 || options.vocab_valid > 0, "vocab_valid is ",
                    options.vocab_valid, ": it must be above 0, or None for the whole vocabulary");
  TORCH_CHECK_VALUE(weight.size(0) > 0 || !group.is_alone(),
                    "weight has no rows: gather it first where it is sharded by parameters");
  TORCH_CHECK_VALUE(!options.sequence_parallel || !group.is_alone(),
                    "sequence_parallel needs a process_group to gather hidden from");
}

at::Tensor HiddenOfAllRows(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                           const RankGroup& group) {
  const at::Tensor hidden = inputs.hidden.dim() == 2
                                ? inputs.hidden
                                : inputs.hidden.reshape({-1, inputs.hidden.size(-1)});
  return options.sequence_parallel ? group.Gather(hidden) : hidden;
}

at::Tensor FlatTarget(const LinearLogprobInputs& inputs) {
  return Flat(inputs.target).to(at::kLong);
}

Rows RowsOf(const RowSelection& selection, const at::Tensor& hidden,
            const LinearLogprobInputs& inputs) {
  Rows rows;
  rows.all_targets = FlatTarget(inputs);
  rows.num_all = rows.all_targets.size(0);
  rows.num_out_of_vocab = selection.num_out_of_vocab;
  rows.are_unchecked = selection.are_unchecked;
  rows.search = selection.search;
  rows.index = rows.search != nullptr ? rows.search->index() : selection.index;
  rows.hidden = rows.search != nullptr ? rows.search->Gather(hidden) : rows.Select(hidden);
  if (inputs.row_temperature.has_value()) {
    rows.temperature = rows.Select(Flat(*inputs.row_temperature));
  }
  return rows;
}

std::vector<int64_t> CommonArguments(const LinearLogprobInputs& inputs,
                                     const LinearLogprobOptions& options,
                                     const RowSelection& selection) {
  if (options.group.empty()) return {};
  return {inputs.target.numel(),
          selection.target_checksum,
          inputs.hidden.numel(),
          options.ignore_index,
          options.vocab_valid,
          static_cast<int64_t>(WideType(inputs)),
          IsForwardFused(inputs, options),
          static_cast<int64_t>(inputs.hidden.scalar_type()),
          std::bit_cast<int64_t>(options.temperature),
          std::bit_cast<int64_t>(options.scale),
          std::bit_cast<int64_t>(options.softcap),
          inputs.row_temperature.has_value(),
          options.sequence_parallel,
          options.out_of_vocab_is_zero,
          options.need_entropy,
          options.need_argmax,
          options.need_mean_logit};
}

void CheckOwned(const RowSelection& selection, const at::Tensor& target,
                const LinearLogprobOptions& options, int64_t vocab_size) {
  if (options.out_of_vocab_is_zero || selection.num_out_of_vocab == 0) return;
  TORCH_CHECK_INDEX(false, "target ", target[selection.first_out_of_vocab].item<int64_t>(),
                    " of row ", selection.first_out_of_vocab,
                    " is in no rank's part of the vocabulary, [0, ", vocab_size, "), nor are ",
                    selection.num_out_of_vocab - 1, " others; ignored ones hold ignore_index");
}

void CheckOwners(const Rows& rows, const at::Tensor& owners, const LinearLogprobInputs& inputs,
                 const LinearLogprobOptions& options, int64_t vocab_size) {
  if (options.out_of_vocab_is_zero) return;
  const at::Tensor found = at::nonzero(owners == 0).squeeze(1);
  if (found.size(0) == 0) return;
  const auto first = found[0].item<int64_t>();
  const RowSelection unowned = {
      .num_out_of_vocab = found.size(0),
      .first_out_of_vocab = rows.index.defined() ? rows.index[first].item<int64_t>() : first};
  CheckOwned(unowned, FlatTarget(inputs), options, vocab_size);
}

at::ScalarType WideType(const LinearLogprobInputs& inputs) {
  const bool is_double =
      inputs.hidden.scalar_type() == at::kDouble || inputs.weight.scalar_type() == at::kDouble;
  return is_double ? at::kDouble : at::kFloat;
}

}  // namespace logprobd::torch_ops
