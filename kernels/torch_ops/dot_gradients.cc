#include "kernels/torch_ops/dot_gradients.h"

#include <ATen/ops/where.h>

#include "kernels/torch_ops/fused_dot_gradients.h"
#include "kernels/torch_ops/products.h"
#include "kernels/torch_ops/row_terms.h"

namespace logprobd::torch_ops {
namespace {

/// With tensor operations, for every device and option.
class TensorDotGradients : public DotGradients {
 public:
  explicit TensorDotGradients(const DotGradientsArguments& arguments)
      : arguments_(arguments),
        terms_(TermsOf(arguments.rows, arguments.inputs, arguments.options)),
        wide_(WideType(arguments.inputs)) {}

  Columns Next(int64_t begin) const override {
    const Shard& shard = arguments_.shard;
    return BlockOfColumns(begin, shard.columns, shard.begin, arguments_.rows.rows.size());
  }

  at::Tensor Of(Columns columns) override {
    const LinearLogprobOptions& options = arguments_.options;
    const LinearLogprobInputs& inputs = arguments_.inputs;
    const at::Tensor logits = Logits(columns);
    at::Tensor gradient = OfLogits(logits, columns);
    if (options.softcap > 0) {
      const at::Tensor t = logits / options.softcap;
      gradient.mul_(1 - t * t);  // the derivative of tanh
    }
    if (arguments_.bias_sum.defined()) {
      arguments_.bias_sum.narrow(0, columns.begin, columns.size()).add_(gradient.sum(0));
    }
    if (options.scale != 1) gradient.mul_(options.scale);
    return IsMultipliedAsIs(inputs.hidden, inputs.weight) ? gradient.to(inputs.weight.scalar_type())
                                                          : gradient;
  }

 private:
  at::Tensor Logits(Columns columns) const {
    const BackwardRows& all = arguments_.rows;
    if (all.cached.has_logits()) return all.cached.Logits(columns);
    return BlockLogits(all.rows.hidden, arguments_.inputs, arguments_.options, columns, wide_);
  }

  /// With respect to the logits before temperature.
  at::Tensor OfLogits(const at::Tensor& logits, Columns columns) const {
    const Shard& shard = arguments_.shard;
    const at::Tensor log_p = (logits - terms_.level).mul_(terms_.scale).add_(terms_.rest);
    at::Tensor factor = terms_.free;
    if (terms_.d_entropy.defined()) {
      factor = factor - terms_.d_entropy * (log_p + terms_.entropy);
    }
    const at::Tensor p = log_p.exp();
    // A probability of 0 has no part, though its logarithm be infinite.
    at::Tensor gradient = at::where(p == 0, 0, p * factor);
    if (terms_.target.defined()) {
      const auto [column, is_here] =
          FindTargets(arguments_.rows.rows, shard.begin + columns.begin, columns.size());
      gradient.scatter_add_(1, column.unsqueeze(1), terms_.target * is_here.unsqueeze(1));
    }
    if (terms_.mean.defined()) {
      gradient.add_(terms_.mean * shard.MeanLogitWeights(arguments_.inputs, columns).to(wide_));
    }
    return gradient.mul_(terms_.scale);
  }

  const DotGradientsArguments arguments_;
  const RowTerms terms_;
  const at::ScalarType wide_;
};

}  // namespace

std::unique_ptr<DotGradients> MakeDotGradients(const DotGradientsArguments& arguments) {
  if (auto fused = MakeFusedDotGradients(arguments)) return fused;
  return std::make_unique<TensorDotGradients>(arguments);
}

}  // namespace logprobd::torch_ops
