#include "kernels/torch_ops/paths/student_gradients.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "kernels/torch_ops/paths/logits.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {

StudentGradients::StudentGradients(const DivergenceInputs& inputs, const DivergenceRows& rows,
                                   GradientNeeds needs, bool is_at_once)
    : inputs_(inputs), wide_(rows.wide) {
  const auto options = inputs.student_hidden.options();
  const at::Tensor& weight = inputs.student_weight;
  if (needs.hidden) hidden_ = at::empty({rows.size(), weight.size(1)}, options);
  if (needs.weight) {
    weight_ = at::empty(weight.sizes(), options.dtype(is_at_once ? weight.scalar_type() : wide_));
    const int64_t columns = rows.size() > 0 ? rows.columns() : 0;
    weight_.narrow(0, columns, weight.size(0) - columns).zero_();
  }
  if (needs.bias) bias_ = at::zeros({weight.size(0)}, options.dtype(wide_));
}

void StudentGradients::Add(const DivergenceRows& rows, int64_t begin, const at::Tensor& gradient,
                           const at::Tensor& factors) {
  at::Tensor hidden_gradient, hidden_sum;
  if (hidden_.defined()) {
    hidden_gradient = SliceRows(hidden_, begin, rows.size());
    hidden_sum = hidden_.scalar_type() == wide_
                     ? hidden_gradient
                     : at::empty(hidden_gradient.sizes(), hidden_.options().dtype(wide_));
  }
  at::Tensor hidden = rows.student_hidden;
  if (factors.defined() && weight_.defined()) {
    hidden = hidden * factors;
    if (rows.are_gradients_in_sixteen_bits()) hidden = hidden.to(gradient.scalar_type());
  }
  const auto add_columns = [&](Columns columns) {
    const at::Tensor part = gradient.narrow(1, columns.begin, columns.size());
    if (hidden_sum.defined()) {
      MultiplyInto(hidden_sum, columns.begin == 0 ? Into::kReplace : Into::kAddTo, part,
                   SliceRows(rows.student.weight, columns.begin, columns.size()), wide_);
    }
    if (weight_.defined()) {
      MultiplyInto(SliceRows(weight_, columns.begin, columns.size()),
                   begin == 0 ? Into::kReplace : Into::kAddTo, part.t(), hidden, wide_);
    }
    if (bias_.defined()) AddBias(rows, columns, part, factors);
  };
  ForEachColumns(rows.are_gradients_in_sixteen_bits(), rows.size(), rows.columns(), add_columns);
  if (hidden_sum.defined() && factors.defined()) hidden_sum.mul_(factors);
  if (!hidden_sum.is_same(hidden_gradient)) hidden_gradient.copy_(hidden_sum);
}

InputGradients StudentGradients::Result(const Rows& subset) const {
  const at::Tensor& hidden = inputs_.student_hidden;
  const at::Tensor& weight = inputs_.student_weight;
  InputGradients gradients =
      EmptyGradients(hidden, weight, inputs_.student_bias, GradientNeeds::None());
  if (hidden_.defined()) gradients.hidden = subset.ScatterToAll(hidden_).view(hidden.sizes());
  if (weight_.defined()) gradients.weight = weight_.to(weight.scalar_type());
  if (bias_.defined()) gradients.bias = bias_.to(inputs_.student_bias->scalar_type());
  return gradients;
}

/// The gradient of the dot products has the scale as a factor, which the bias's gradient lacks.
void StudentGradients::AddBias(const DivergenceRows& rows, Columns columns, const at::Tensor& part,
                               const at::Tensor& factors) const {
  constexpr int64_t kStep = 4'096;  // The parts are widened.
  for (int64_t begin = 0; begin < columns.size(); begin += kStep) {
    const int64_t size = std::min(kStep, columns.size() - begin);
    at::Tensor values = part.narrow(1, begin, size).to(wide_);
    if (factors.defined()) values = values * factors;
    bias_.narrow(0, columns.begin + begin, size).add_(values.sum(0), 1 / rows.student.scale);
  }
}

}  // namespace logprobd::torch_ops
