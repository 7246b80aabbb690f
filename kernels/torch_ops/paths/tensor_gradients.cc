// Computes gradients with tensor operations: logits, cached or recomputed -> gradient of the logits
// -> gradient of the dot products.

#include <ATen/ops/cat.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <memory>
#include <vector>

#include "kernels/torch_ops/paths/logit_cache.h"
#include "kernels/torch_ops/paths/logits.h"
#include "kernels/torch_ops/paths/tensor_path.h"
#include "kernels/torch_ops/rows/shard.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {
namespace {

/// Per-row constants of the gradient
///   dx_j = p_j (free - d_entropy (ln p_j + entropy)) + target [j = t] + mean w_j
/// where p is the softmax, t the target and w the weights of the mean logit. Each is [n, 1] in the
/// wide dtype.
struct RowConstants {
  at::Tensor free;             ///< d_lse - d_logprob
  at::Tensor d_entropy;        ///< Undefined: 0.
  at::Tensor target;           ///< d_logprob; undefined: 0.
  at::Tensor mean;             ///< d_mean_logit; undefined: 0.
  at::Tensor entropy;          ///< Undefined if d_entropy is undefined.
  at::Tensor reference_logit;  ///< lse * temperature, rounded; close to the largest logits.
  at::Tensor rest;             ///< reference_logit / temperature - lse
  at::Tensor scale;            ///< 1 / temperature
};

RowConstants ConstantsOf(const BackwardRows& all, const Problem& problem) {
  const at::ScalarType wide = problem.wide;
  const Rows& rows = all.rows;
  RowConstants constants;
  const auto gather = [&](const at::Tensor& values) {
    return rows.GatherFromAll(values.reshape({-1})).to(wide).unsqueeze(1);
  };
  if (all.upstream.entropy.has_value()) {
    constants.d_entropy = gather(*all.upstream.entropy);
    constants.entropy = gather(all.saved.entropy);
  }
  if (all.upstream.mean_logit.has_value()) constants.mean = gather(*all.upstream.mean_logit);
  constants.free = at::zeros({rows.size(), 1}, rows.hidden.options().dtype(wide));
  if (all.upstream.lse.has_value()) constants.free = gather(*all.upstream.lse);
  if (all.upstream.logprob.has_value()) {
    constants.target = gather(*all.upstream.logprob);
    constants.free = constants.free - constants.target;
  }
  constants.scale = PerTemperature(1, rows, problem, wide);
  // Logits are used relative to a reference logit, because large logits would lose accuracy
  // otherwise: the rounding errors of lse and 1 / temperature would exceed the error that the
  // probabilities may have.
  const at::Tensor exact_scale = PerTemperature(1, rows, problem, at::kDouble);
  const at::Tensor lse = (all.saved.lse.to(at::kDouble) + all.saved.lse_rest).reshape({-1});
  const at::Tensor exact_lse = rows.GatherFromAll(lse).unsqueeze(1);
  constants.reference_logit = (exact_lse / exact_scale).to(wide);
  constants.rest = (constants.reference_logit.to(at::kDouble) * exact_scale - exact_lse).to(wide);
  return constants;
}

class TensorDotGradients : public DotGradients {
 public:
  explicit TensorDotGradients(const DotGradientsArguments& arguments)
      : arguments_(arguments), constants_(ConstantsOf(arguments.rows, arguments.problem)) {}

  Columns Next(int64_t begin) const override {
    return BlockOfColumns(arguments_.problem.shard, begin, arguments_.rows.rows.size());
  }

  at::Tensor Form(Columns columns) override {
    const LinearLogprobOptions& options = arguments_.problem.options;
    const LinearLogprobInputs& inputs = arguments_.problem.inputs;
    const at::Tensor logits = Logits(columns);
    at::Tensor gradient = GradientOfLogits(logits, columns);
    if (options.softcap > 0) {
      const at::Tensor t = logits / options.softcap;
      gradient.mul_(1 - t * t);  // the derivative of tanh
    }
    if (arguments_.bias_sum.defined()) {
      arguments_.bias_sum.narrow(0, columns.begin, columns.size()).add_(gradient.sum(0));
    }
    if (options.scale != 1) gradient.mul_(options.scale);
    return IsMultipliedInSixteenBits(inputs.hidden, inputs.weight)
               ? gradient.to(inputs.weight.scalar_type())
               : gradient;
  }

  std::vector<at::Tensor> HiddenTerms() const override { return {arguments_.rows.rows.hidden}; }

 private:
  at::Tensor Logits(Columns columns) const {
    const CachedRows& cached = arguments_.rows.cached;
    const at::Tensor& hidden = arguments_.rows.rows.hidden;
    const int64_t num_cached = cached.has_logits() ? cached.size() : 0;
    const int64_t num_others = hidden.size(0) - num_cached;
    if (num_others == 0 && num_cached > 0) return cached.Logits(columns);
    const at::Tensor others =
        BlockLogits(SliceRows(hidden, num_cached, num_others), arguments_.problem, columns);
    return num_cached > 0 ? at::cat({cached.Logits(columns), others}) : others;
  }

  /// Returns the gradient with respect to the logits before temperature.
  at::Tensor GradientOfLogits(const at::Tensor& logits, Columns columns) const {
    const Problem& problem = arguments_.problem;
    const at::Tensor log_p =
        (logits - constants_.reference_logit).mul_(constants_.scale).add_(constants_.rest);
    at::Tensor factor = constants_.free;
    if (constants_.d_entropy.defined()) {
      factor = factor - constants_.d_entropy * (log_p + constants_.entropy);
    }
    const at::Tensor p = log_p.exp();
    // A probability of 0 contributes no gradient, even if its logarithm is infinite.
    at::Tensor gradient = at::where(p == 0, 0, p * factor);
    if (constants_.target.defined()) {
      const auto [column, is_in_range] =
          FindTargets(arguments_.rows.rows, problem.shard.begin + columns.begin, columns.size());
      gradient.scatter_add_(1, column.unsqueeze(1), constants_.target * is_in_range.unsqueeze(1));
    }
    if (constants_.mean.defined()) {
      gradient.add_(constants_.mean * MeanLogitWeights(problem, columns).to(problem.wide));
    }
    return gradient.mul_(constants_.scale);
  }

  const DotGradientsArguments arguments_;
  const RowConstants constants_;
};

}  // namespace

std::unique_ptr<DotGradients> TensorPath::MakeDotGradients(
    const DotGradientsArguments& arguments) const {
  return std::make_unique<TensorDotGradients>(arguments);
}

}  // namespace logprobd::torch_ops
