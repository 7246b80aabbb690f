#include "kernels/torch_ops/loss_weights.h"

#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "kernels/torch_ops/views.h"

namespace logprobd::torch_ops {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

/// Sizes may be symbolic.
void CheckWeight(const MaybeTensor& values, const char* name, const LinearLogprobInputs& inputs) {
  if (!values.has_value()) return;
  TORCH_CHECK_VALUE(values->sym_sizes() == inputs.target.sym_sizes(), name, " has the shape ",
                    values->sym_sizes(), " and target ", inputs.target.sym_sizes(),
                    ": it must be the same");
  TORCH_CHECK_VALUE(values->is_floating_point(), name, " is ", values->scalar_type(),
                    ": it must hold real numbers");
  TORCH_CHECK_VALUE(values->device() == inputs.hidden.device(), name, " is on ", values->device(),
                    " and hidden on ", inputs.hidden.device());
}

}  // namespace

void CheckWeights(const LossWeights& weights, const LinearLogprobInputs& inputs) {
  constexpr std::array<const char*, 4> kNames = {"logprob_weights", "entropy_weights",
                                                 "lse_weights", "mean_logit_weights"};
  bool has_any = false;
  for (size_t i = 0; i < kScores.size(); ++i) {
    TORCH_CHECK_VALUE(std::isfinite(weights.factors[i]), kNames[i], " is ", weights.factors[i],
                      ": it must be finite");
    CheckWeight(weights.rows.*kScores[i], kNames[i], inputs);
    has_any = has_any || weights.factors[i] != 0;
  }
  TORCH_CHECK_VALUE(has_any,
                    "logprob_weights, entropy_weights, lse_weights, mean_logit_weights: a loss "
                    "needs one of them that is not 0");
}

UpstreamGradients DecidingWeights(const LossWeights& weights) {
  UpstreamGradients deciding;
  for (size_t i = 0; i < kScores.size(); ++i) {
    if (weights.factors[i] == 0) continue;
    const MaybeTensor& given = weights.rows.*kScores[i];
    if (!given.has_value()) return {};
    deciding.*kScores[i] = given;
  }
  return deciding;
}

bool HasAny(const UpstreamGradients& gradients) {
  return std::any_of(kScores.begin(), kScores.end(),
                     [&](const auto score) { return (gradients.*score).has_value(); });
}

UpstreamGradients WeightsOfRows(const LossWeights& weights, const Rows& rows,
                                const LinearLogprobInputs& inputs,
                                const LinearLogprobOptions& options) {
  const auto wide = inputs.hidden.options().dtype(WideType(inputs));
  const at::Tensor counts =
      rows.are_unchecked ? rows.target() != options.ignore_index : at::Tensor();
  const double num_rows =
      weights.is_mean ? static_cast<double>(std::max<int64_t>(rows.size(), 1)) : 1.0;
  at::Tensor unseen_share;
  if (weights.is_mean && rows.are_unchecked) {
    unseen_share = counts.sum().clamp_min(1).to(wide.dtype()).reciprocal();
  }
  UpstreamGradients result;
  for (size_t i = 0; i < kScores.size(); ++i) {
    if (weights.factors[i] == 0) continue;
    const double factor =
        unseen_share.defined() ? weights.factors[i] : weights.factors[i] / num_rows;
    const MaybeTensor& given = weights.rows.*kScores[i];
    at::Tensor values;
    if (given.has_value()) {
      values = rows.Select(Flat(*given));
      if (values.element_size() == 2) values = values.to(wide.dtype());  // or means are rounded
      if (factor != 1) values = values * factor;
    } else {
      values = at::full({}, factor, wide).expand({rows.size()});
    }
    if (unseen_share.defined()) values = values * unseen_share;
    if (counts.defined()) values = at::where(counts, values, 0);  // whatever ignored ones hold
    result.*kScores[i] = values;
  }
  return result;
}

}  // namespace logprobd::torch_ops
