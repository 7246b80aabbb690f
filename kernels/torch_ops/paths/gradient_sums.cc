#include "kernels/torch_ops/paths/gradient_sums.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/torch_ops/rows/device_ops.h"
#include "kernels/torch_ops/rows/shard.h"

namespace logprobd::torch_ops {
namespace {

/// Multiplies `gradient`, [n, columns], the gradient of the dot products, by the weight's rows for
/// these columns and adds the product to `sum`. The first block of columns replaces `sum` instead.
void AddHiddenProduct(const at::Tensor& gradient, Columns columns, const Problem& problem,
                      const at::Tensor& sum) {
  const at::Tensor weight = SliceRows(problem.inputs.weight, columns.begin, columns.size());
  MultiplyInto(sum, columns.begin == 0 ? Into::kReplace : Into::kAddTo, gradient, weight,
               problem.wide);
}

/// Rows [begin, begin + size).
struct RowRange {
  int64_t begin;
  int64_t size;
};

/// Divides the rows into blocks. Rows with cached exponentials form blocks of their own, so that
/// their gradients can overwrite the exponentials, and come last.
std::vector<RowRange> BlocksOf(const BackwardRows& all) {
  const int64_t num_rows = all.rows.size();
  const int64_t num_apart = all.cached.has_logits() ? 0 : std::min(all.cached.size(), num_rows);
  std::vector<RowRange> blocks;
  const auto append = [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kBlockRows) {
      blocks.push_back({begin, std::min(kBlockRows, end - begin)});
    }
  };
  append(num_apart, num_rows);
  append(0, num_apart);
  return blocks;
}

}  // namespace

bool AreAddedAtOnce(int64_t num_rows) { return num_rows <= kBlockRows; }

GradientSums AllocateSums(const Problem& problem, GradientNeeds needs,
                          const MaybeTensor& weight_grad, int64_t num_rows, bool is_added_at_once) {
  const at::Tensor& weight = problem.inputs.weight;
  const auto wide = problem.inputs.hidden.options().dtype(problem.wide);
  GradientSums sums;
  if (needs.hidden) {
    const bool is_rounded_by_block = !is_added_at_once && !problem.sums_hidden_gradient();
    sums.hidden = at::empty({num_rows, weight.size(1)},
                            is_rounded_by_block ? problem.inputs.hidden.options() : wide);
  }
  if (needs.bias) sums.bias = at::zeros({weight.size(0)}, wide);
  if (!needs.weight) return sums;
  if (weight_grad.has_value()) {
    sums.weight = *weight_grad;
    return sums;
  }
  sums.weight = at::empty(weight.sizes(), is_added_at_once ? weight.options() : wide);
  const int64_t padding = weight.size(0) - problem.shard.columns;
  if (padding > 0) sums.weight.narrow(0, problem.shard.columns, padding).zero_();
  sums.weight_into = Into::kReplace;
  return sums;
}

void AddGradients(const BackwardRows& all, const Problem& problem, GradientSums& sums,
                  const ListedGradients& listed,
                  const std::function<void()>& when_hidden_is_complete) {
  const int64_t num_columns = problem.shard.columns;
  at::Tensor block_sum;  // of a block of rows; undefined: sums.hidden is not rounded
  if (sums.hidden.defined() && sums.hidden.scalar_type() != problem.wide) {
    block_sum = at::empty({std::min(kBlockRows, all.rows.size()), sums.hidden.size(1)},
                          sums.hidden.options().dtype(problem.wide));
  }
  const std::vector<RowRange> blocks = BlocksOf(all);
  for (const auto& [begin, size] : blocks) {
    const BackwardRows block = all.Slice(begin, size);
    at::Tensor hidden_gradient = sums.hidden;
    if (hidden_gradient.defined()) {
      hidden_gradient = SliceRows(hidden_gradient, begin, block.rows.size());
      if (num_columns == 0) hidden_gradient.zero_();
    }
    at::Tensor hidden_sum = block_sum.defined() ? block_sum : hidden_gradient;
    const auto gradients = problem.path->MakeDotGradients({block, problem, sums.bias});
    const at::Tensor factors = gradients->RowFactors();
    std::vector<at::Tensor> hidden_terms;
    if (sums.weight.defined()) hidden_terms = gradients->HiddenTerms();
    for (Columns columns = {0, 0}; columns.end < num_columns;) {
      columns = gradients->Next(columns.end);
      const at::Tensor gradient = gradients->Form(columns);
      const int64_t num_rows = gradient.size(0);
      if (num_rows == 0) return;  // The row compaction has found no rows.
      listed.Write(gradient, columns, begin);
      if (hidden_sum.defined()) {
        hidden_sum = SliceRows(hidden_sum, 0, num_rows);
        AddHiddenProduct(gradient, columns, problem, hidden_sum);
        const bool is_last = columns.end == num_columns;
        if (is_last && factors.defined()) {
          problem.device_ops->MultiplyRows(hidden_sum, factors, hidden_sum);
        }
        if (is_last && block_sum.defined()) {
          SliceRows(hidden_gradient, 0, num_rows).copy_(hidden_sum);
        }
        const bool is_complete = is_last && begin == blocks.back().begin;
        if (is_complete && when_hidden_is_complete) when_hidden_is_complete();
      }
      if (sums.weight.defined()) {
        const at::Tensor sum = SliceRows(sums.weight, columns.begin, columns.size());
        Into into = sums.weight_into;
        for (const at::Tensor& term : hidden_terms) {
          MultiplyInto(sum, std::exchange(into, Into::kAddTo), gradient.t(),
                       SliceRows(term, 0, num_rows), problem.wide);
        }
      }
    }
    sums.weight_into = Into::kAddTo;
  }
  if (sums.bias.defined()) listed.AddToBias(sums.bias);
}

void ReserveHiddenSum(const Problem& problem) {
  const auto wide = problem.inputs.hidden.options().dtype(problem.wide);
  const int64_t num_rows = problem.num_rows();
  const at::Tensor all = at::empty({num_rows, problem.hidden_size()}, wide);
  if (!problem.options.sequence_parallel) return;
  at::empty({num_rows / problem.group.size(), problem.hidden_size()}, wide);
}

RankGroup::PendingSum StartHiddenSum(const at::Tensor& hidden, const at::Tensor& row_indices,
                                     const Problem& problem) {
  // A gradient that is not summed is rounded before it is scattered, which takes half the memory.
  const bool is_summed = problem.sums_hidden_gradient();
  const at::Tensor part = is_summed ? hidden : hidden.to(problem.inputs.hidden.scalar_type());
  Rows rows;
  rows.row_indices = row_indices;
  rows.num_all = problem.num_rows();
  const RankGroup& ranks = is_summed ? problem.group : RankGroup::Alone();
  return ranks.StartSum(rows.ScatterToAll(part), problem.options.sequence_parallel);
}

InputGradients ToInputGradients(const std::optional<RankGroup::PendingSum>& hidden_sum,
                                const GradientSums& sums, const LinearLogprobInputs& inputs) {
  const auto none = [](const at::Tensor& like) { return at::empty({0}, like.options()); };
  InputGradients gradients = {none(inputs.hidden), none(inputs.weight),
                              none(inputs.bias.value_or(inputs.weight))};
  if (hidden_sum.has_value()) {
    gradients.hidden =
        hidden_sum->Result().to(inputs.hidden.scalar_type()).view(inputs.hidden.sizes());
  }
  if (sums.weight.defined()) {
    // If there were no rows, nothing has been written.
    if (sums.weight_into == Into::kReplace) at::Tensor(sums.weight).zero_();
    gradients.weight = sums.weight.to(inputs.weight.scalar_type());
  }
  if (sums.bias.defined()) gradients.bias = sums.bias.to(inputs.bias->scalar_type());
  return gradients;
}

}  // namespace logprobd::torch_ops
