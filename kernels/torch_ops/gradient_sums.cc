#include "kernels/torch_ops/gradient_sums.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "kernels/torch_ops/dot_gradients.h"
#include "kernels/torch_ops/fused_scale.h"
#include "kernels/torch_ops/logits.h"
#include "kernels/torch_ops/views.h"

namespace logprobd::torch_ops {
namespace {

/// Those of a block of columns are given as the gradient [n, columns] of its dot products.
void AddHiddenProduct(const at::Tensor& gradient, Columns columns,
                      const LinearLogprobInputs& inputs, const at::Tensor& sum) {
  const at::Tensor weight = RowsFrom(inputs.weight, columns.begin, columns.size());
  MultiplyInto(sum, columns.begin == 0 ? Into::kReplace : Into::kAddTo, gradient, weight,
               WideType(inputs));
}

/// Each row times its factor, rounded once to the rows' dtype.
void MultiplyRows(const at::Tensor& rows, const at::Tensor& factors, at::Tensor& products) {
  if (!MultiplyRowsOnGpu(rows, factors, products)) at::mul_out(products, rows, factors);
}

at::Tensor MultipliedRows(const at::Tensor& rows, const at::Tensor& factors) {
  at::Tensor products = at::empty(rows.sizes(), rows.options());
  MultiplyRows(rows, factors, products);
  return products;
}

}  // namespace

bool AreAddedAtOnce(int64_t num_rows) { return num_rows <= kBlockRows; }

GradientSums RoomForGradients(const LinearLogprobInputs& inputs, const Shard& shard,
                              GradientNeeds needs, const std::optional<at::Tensor>& weight_grad,
                              int64_t num_rows, bool is_added_at_once) {
  const at::Tensor& weight = inputs.weight;
  const auto wide = inputs.hidden.options().dtype(WideType(inputs));
  GradientSums sums;
  if (needs.hidden) sums.hidden = at::empty({num_rows, weight.size(1)}, wide);
  if (needs.bias) sums.bias = at::zeros({weight.size(0)}, wide);
  if (!needs.weight) return sums;
  if (weight_grad.has_value()) {
    sums.weight = *weight_grad;
    return sums;
  }
  sums.weight = at::empty(weight.sizes(), is_added_at_once ? weight.options() : wide);
  const int64_t padding = weight.size(0) - shard.columns;
  if (padding > 0) sums.weight.narrow(0, shard.columns, padding).zero_();
  sums.weight_into = Into::kReplace;
  return sums;
}

void AddGradients(const BackwardRows& all, const LinearLogprobInputs& inputs,
                  const LinearLogprobOptions& options, const Shard& shard, GradientSums& sums,
                  const std::function<void()>& when_hidden_is_added) {
  for (int64_t begin = 0; begin < all.rows.size(); begin += kBlockRows) {
    const BackwardRows block = all.Part(begin, std::min(kBlockRows, all.rows.size() - begin));
    at::Tensor hidden_sum = sums.hidden;
    if (hidden_sum.defined()) hidden_sum = RowsFrom(hidden_sum, begin, block.rows.size());
    if (hidden_sum.defined() && shard.columns == 0) hidden_sum.zero_();
    const auto gradients = MakeDotGradients({block, inputs, options, shard, sums.bias});
    const at::Tensor factors = gradients->RowFactors();
    const at::Tensor hidden =
        factors.defined() ? MultipliedRows(block.rows.hidden, factors) : block.rows.hidden;
    for (Columns columns = {0, 0}; columns.end < shard.columns;) {
      columns = gradients->Next(columns.end);
      const at::Tensor gradient = gradients->Of(columns);
      const int64_t num_rows = gradient.size(0);
      if (num_rows == 0) return;  // a search has found none
      if (hidden_sum.defined()) {
        hidden_sum = RowsFrom(hidden_sum, 0, num_rows);
        AddHiddenProduct(gradient, columns, inputs, hidden_sum);
        const bool is_last = columns.end == shard.columns;
        if (is_last && factors.defined()) MultiplyRows(hidden_sum, factors, hidden_sum);
        const bool is_all = is_last && begin + kBlockRows >= all.rows.size();
        if (is_all && when_hidden_is_added) when_hidden_is_added();
      }
      if (sums.weight.defined()) {
        MultiplyInto(RowsFrom(sums.weight, columns.begin, columns.size()), sums.weight_into,
                     gradient.t(), RowsFrom(hidden, 0, num_rows), WideType(inputs));
      }
    }
    sums.weight_into = Into::kAddTo;
  }
}

void ReserveHiddenSum(const LinearLogprobInputs& inputs) {
  at::empty({inputs.target.numel(), inputs.weight.size(1)},
            inputs.hidden.options().dtype(WideType(inputs)));
}

RankGroup::PendingSum StartHiddenSum(const at::Tensor& hidden, const Rows& rows,
                                     const LinearLogprobInputs& inputs,
                                     const LinearLogprobOptions& options, const RankGroup& group) {
  // Alone it is rounded before it is spread: half the memory.
  const at::Tensor part = group.is_alone() ? hidden.to(inputs.hidden.scalar_type()) : hidden;
  return group.StartSum(rows.Spread(part), options.sequence_parallel);
}

InputGradients GradientsOf(const std::optional<RankGroup::PendingSum>& hidden_sum,
                           const GradientSums& sums, const LinearLogprobInputs& inputs) {
  const auto none = [](const at::Tensor& like) { return at::empty({0}, like.options()); };
  InputGradients gradients = {none(inputs.hidden), none(inputs.weight),
                              none(inputs.bias.value_or(inputs.weight))};
  if (hidden_sum.has_value()) {
    gradients.hidden =
        hidden_sum->Result().to(inputs.hidden.scalar_type()).view(inputs.hidden.sizes());
  }
  if (sums.weight.defined()) {
    if (sums.weight_into == Into::kReplace) at::Tensor(sums.weight).zero_();  // there were no rows
    gradients.weight = sums.weight.to(inputs.weight.scalar_type());
  }
  if (sums.bias.defined()) gradients.bias = sums.bias.to(inputs.bias->scalar_type());
  return gradients;
}

}  // namespace logprobd::torch_ops
