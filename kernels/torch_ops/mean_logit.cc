#include "kernels/torch_ops/mean_logit.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "kernels/torch_ops/logits.h"
#include "kernels/torch_ops/products.h"

namespace logprobd::torch_ops {
namespace {

/// Terms of a value in the 16-bit dtype `like`, [k, m]: their sum has 24 bits, or nearly (fp16
/// drops what is too small for it).
at::Tensor Terms(at::Tensor values, at::ScalarType like) {
  constexpr int kNumSplits = 3;
  std::vector<at::Tensor> terms;
  for (int i = 0; i < kNumSplits; ++i) {
    terms.push_back(values.to(like));
    values = values - terms.back().to(at::kFloat);
  }
  return at::stack(terms);
}

/// What values are divided by before they become terms: up to 1, in fp16 they neither flush nor
/// overflow.
at::Tensor Largest(const at::Tensor& values) {
  return values.abs().amax().clamp_min_(std::numeric_limits<float>::min());
}

/// Sum of weight rows, each times its column's weight, [H] in fp32.
at::Tensor MeanWeight(const LinearLogprobInputs& inputs, const Shard& shard) {
  const at::Tensor weights = shard.MeanLogitWeights(inputs, {0, shard.columns}).to(at::kFloat);
  const at::Tensor largest = Largest(weights);
  const at::Tensor terms = Terms(weights / largest, inputs.weight.scalar_type());
  const at::Tensor products = at::mm(terms, inputs.weight.narrow(0, 0, shard.columns), at::kFloat);
  return products.sum(0).mul_(largest);
}

/// Where a cap makes it no product: block by block.
at::Tensor MeanOfCapped(const Rows& rows, const LinearLogprobInputs& inputs,
                        const LinearLogprobOptions& options, const Shard& shard) {
  at::Tensor mean = at::zeros({rows.size()}, inputs.hidden.options().dtype(at::kDouble));
  for (const Columns& columns : CutColumns(shard.columns, shard.begin, rows.size())) {
    const at::Tensor logits = BlockLogits(rows.hidden, inputs, options, columns, at::kFloat);
    mean += logits.to(at::kDouble).mv(shard.MeanLogitWeights(inputs, columns));
  }
  return mean.to(at::kFloat);
}

/// Without a cap it is the product with the mean weight.
at::Tensor MeanOfProducts(const Rows& rows, const LinearLogprobInputs& inputs,
                          const LinearLogprobOptions& options, const Shard& shard) {
  const at::Tensor weight = MeanWeight(inputs, shard);
  const at::Tensor largest = Largest(weight);
  const at::Tensor terms = Terms(weight / largest, inputs.hidden.scalar_type());
  at::Tensor mean = at::mm(rows.hidden, terms.t(), at::kFloat).sum(1).mul_(largest * options.scale);
  if (inputs.bias.has_value()) {
    const at::Tensor bias = inputs.bias->narrow(0, 0, shard.columns).to(at::kDouble);
    mean += bias.dot(shard.MeanLogitWeights(inputs, {0, shard.columns})).to(at::kFloat);
  }
  return mean;
}

}  // namespace

at::Tensor MeanLogit(const Rows& rows, const LinearLogprobInputs& inputs,
                     const LinearLogprobOptions& options, const Shard& shard,
                     const RankGroup& group) {
  at::Tensor mean = at::zeros({rows.size()}, inputs.hidden.options().dtype(at::kFloat));
  if (shard.columns > 0) {
    mean = options.softcap > 0 ? MeanOfCapped(rows, inputs, options, shard)
                               : MeanOfProducts(rows, inputs, options, shard);
  }
  mean.mul_(PerTemperature(1, rows, options, at::kFloat).squeeze(1));
  group.Sum(mean);
  return mean;
}

}  // namespace logprobd::torch_ops
