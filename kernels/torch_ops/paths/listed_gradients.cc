#include "kernels/torch_ops/paths/listed_gradients.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <vector>

#include "kernels/torch_ops/paths/logits.h"

namespace logprobd::torch_ops {
namespace {

/// Exceeds every id, so that row * kIdsMax + id is different for different pairs.
constexpr int64_t kIdsMax = int64_t{1} << 21;

at::Tensor InFp64(const at::Tensor& values) { return Flat(values).to(at::kDouble); }

/// Returns, for each pair, the sum of `values` over the pairs that are equal to it. The sums have
/// the same bits every time: index_put_ adds in a fixed order, unlike index_add_.
at::Tensor SumOfEqualPairs(const ListedPairs& pairs, const at::Tensor& values) {
  const int64_t count = values.size(0);
  const auto [keys, order] = at::sort(pairs.rows * kIdsMax + pairs.ids, /*stable=*/true, 0, false);
  const at::Tensor is_first =
      at::cat({at::ones({1}, keys.options().dtype(at::kBool)),
               keys.narrow(0, 1, count - 1) != keys.narrow(0, 0, count - 1)});
  const at::Tensor group = is_first.cumsum(0) - 1;
  const at::Tensor sums = at::zeros_like(values).index_put_({group}, values.index_select(0, order),
                                                            /*accumulate=*/true);
  return at::empty_like(values).index_copy_(0, order, sums.index_select(0, group));
}

}  // namespace

ListedGradients::ListedGradients(const UpstreamGradients& upstream, const SavedOutputs& saved,
                                 const Problem& problem)
    : upstream_(upstream) {
  upstream_.top_k_logprobs.reset();
  upstream_.candidate_logprobs.reset();
  deciding_ = upstream_;
  const int64_t num_all = problem.num_rows();
  std::vector<at::Tensor> rows, ids, logprobs, gradients;
  const auto add_list = [&](const ListedPairs& list, const MaybeTensor& log_p,
                            const MaybeTensor& gradient) {
    TORCH_CHECK_VALUE(log_p.has_value() && log_p->sizes() == gradient->sizes(),
                      "the backward pass lacks the logprobs whose gradients are given");
    rows.push_back(list.rows);
    ids.push_back(list.ids);
    logprobs.push_back(InFp64(*log_p));
    gradients.push_back(InFp64(*gradient));
  };
  if (upstream.top_k_logprobs.has_value()) {
    TORCH_CHECK_VALUE(saved.top_k_ids.has_value(), "the backward pass lacks top_k_ids");
    const at::Tensor numbers = at::arange(num_all, saved.top_k_ids->options());
    const at::Tensor list_rows = numbers.unsqueeze(1).expand({num_all, problem.options.top_k});
    add_list({Flat(list_rows), Flat(*saved.top_k_ids)}, saved.top_k_logprobs,
             upstream.top_k_logprobs);
  }
  if (upstream.candidate_logprobs.has_value()) {
    add_list(CandidatesOf(problem.inputs), saved.candidate_logprobs, upstream.candidate_logprobs);
  }
  if (rows.empty()) return;
  const ListedPairs pairs = {at::cat(rows), at::cat(ids)};
  if (pairs.rows.numel() == 0) return;
  log_p_ = at::cat(logprobs);
  const at::Tensor is_valid = FlatTarget(problem.inputs) != problem.options.ignore_index;
  is_counted_ = is_valid.index_select(0, pairs.rows).logical_and_(pairs.ids >= 0);
  d_logprobs_ = at::where(is_counted_, at::cat(gradients), 0);
  pairs_ = pairs.RelativeTo(0, problem.shard.begin);
  const auto sums_of_rows = [&](const at::Tensor& values) {
    return at::zeros({num_all}, values.options())
        .index_put_({pairs.rows}, values, /*accumulate=*/true);
  };
  at::Tensor d_lse = sums_of_rows(d_logprobs_).neg_();
  if (upstream.lse.has_value()) d_lse += InFp64(*upstream.lse);
  upstream_.lse = d_lse.to(problem.wide);
  // The gradients of a row's candidates may add up to 0.
  deciding_.lse = (d_lse.abs() + sums_of_rows(d_logprobs_.abs())).to(problem.wide);
}

void ListedGradients::Prepare(const RowSubset& subset, const SavedOutputs& saved,
                              const Problem& problem) {
  if (!has_any() || problem.shard.columns == 0) return;
  const LinearLogprobInputs& inputs = problem.inputs;
  const auto at_pairs = [&](const at::Tensor& values) {
    return InFp64(values).index_select(0, pairs_.rows);
  };
  // The formula is that of TensorDotGradients.
  at::Tensor factor = at_pairs(*upstream_.lse);
  if (upstream_.logprob.has_value()) factor = factor - at_pairs(*upstream_.logprob);
  if (upstream_.entropy.has_value()) {
    factor = factor - at_pairs(*upstream_.entropy) * (log_p_ + at_pairs(saved.entropy));
  }
  const at::Tensor p = log_p_.exp();
  at::Tensor d_x = at::where(p == 0, 0, p * factor) + SumOfEqualPairs(pairs_, d_logprobs_);
  if (upstream_.logprob.has_value()) {
    const at::Tensor target = FlatTarget(inputs).index_select(0, pairs_.rows);
    const at::Tensor is_target = target == pairs_.ids + problem.shard.begin;
    d_x = d_x + at::where(is_target, at_pairs(*upstream_.logprob), 0);
  }
  if (upstream_.mean_logit.has_value()) {
    const int64_t columns = problem.shard.columns;
    const at::Tensor weights = MeanLogitWeights(problem, {0, columns});
    d_x = d_x + at_pairs(*upstream_.mean_logit) *
                    weights.index_select(0, pairs_.ids.clamp(0, columns - 1));
  }
  at::Tensor d_z = at::full_like(log_p_, 1 / problem.options.temperature);
  if (inputs.row_temperature.has_value()) d_z = at_pairs(*inputs.row_temperature).reciprocal();
  if (problem.options.softcap > 0) {
    const at::Tensor lse = at_pairs(saved.lse) + at_pairs(saved.lse_rest);
    const at::Tensor t = (log_p_ + lse) / d_z / problem.options.softcap;
    d_z = d_z * (1 - t * t);  // the derivative of tanh
  }
  bias_parts_ = d_logprobs_ * d_z;
  elements_ = at::where(is_counted_, d_x * d_z * problem.options.scale, 0);
  positions_ = pairs_;
  if (!subset.row_indices.defined()) return;
  const at::Tensor numbers = at::arange(subset.row_indices.size(0), pairs_.rows.options());
  positions_.rows = at::full({problem.num_rows()}, -1, pairs_.rows.options())
                        .index_copy_(0, subset.row_indices, numbers)
                        .index_select(0, pairs_.rows);
}

void ListedGradients::Write(at::Tensor gradient, Columns columns, int64_t row_begin) const {
  if (!has_any()) return;
  const PairsInBlock found = FindPairs(positions_.RelativeTo(row_begin, columns.begin),
                                       gradient.size(0), gradient.size(1));
  // The host does not know which pairs are inside. The others write what the first one inside
  // writes, or, if there is none, what the first element is already.
  const at::Tensor first = found.is_inside.to(at::kInt).argmax(0, /*keepdim=*/true);
  const at::Tensor has_first = found.is_inside.any();
  const auto or_first = [&](const at::Tensor& values, const at::Tensor& otherwise) {
    return at::where(found.is_inside, values,
                     at::where(has_first, values.index_select(0, first), otherwise));
  };
  const at::Tensor zero = found.row.new_zeros({});
  const at::Tensor elements = or_first(elements_, gradient[0][0].to(at::kDouble));
  gradient.index_put_({or_first(found.row, zero), or_first(found.column, zero)},
                      elements.to(gradient.scalar_type()));
}

void ListedGradients::AddToBias(at::Tensor bias_sum) const {
  if (!has_any() || !bias_parts_.defined()) return;
  const at::Tensor is_here = pairs_.ids.ge(0).logical_and_(pairs_.ids.lt(bias_sum.size(0)));
  const at::Tensor parts = at::zeros({bias_sum.size(0)}, bias_parts_.options());
  bias_sum += parts.index_put_({pairs_.ids.clamp(0, bias_sum.size(0) - 1)},
                               at::where(is_here, bias_parts_, 0), /*accumulate=*/true);
}

}  // namespace logprobd::torch_ops
