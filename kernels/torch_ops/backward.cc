// Gradients, a block of columns at a time: logits again -> their gradient -> products with the
// weight and the hidden states.

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/logits.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/rows.h"
#include "kernels/torch_ops/shard.h"

namespace logprobd::torch_ops {
namespace {

/// A row's gradients of the loss, [n, 1] each, as they weigh the terms of
///   dx_j = p_j (free - entropy (ln p_j + H)) + target [j = t] + mean w_j
/// with p the softmax, H its entropy, t the target and w the weights of the mean logit.
struct RowWeights {
  at::Tensor free;     ///< d_lse - d_logprob
  at::Tensor entropy;  ///< d_entropy; undefined: 0.
  at::Tensor target;   ///< d_logprob; undefined: 0.
  at::Tensor mean;     ///< d_mean_logit; undefined: 0.
};

/// Everything about the rows that a block of columns needs; [n, 1] in `wide`.
struct BackwardRows {
  Rows rows;
  RowWeights weights;
  at::Tensor level;  ///< A logit near the largest ones: lse * temperature, rounded.
  at::Tensor rest;   ///< level / temperature - lse
  at::Tensor entropy;
  at::Tensor scale;  ///< 1 / temperature
};

/// Rows that any upstream gradient reaches: the others cost nothing and get exact zeros.
at::Tensor Reached(const UpstreamGradients& upstream) {
  at::Tensor reached;
  for (const auto* gradient :
       {&upstream.logprob, &upstream.entropy, &upstream.lse, &upstream.mean_logit}) {
    if (!gradient->has_value()) continue;
    const at::Tensor here = (*gradient)->reshape({-1}) != 0;
    reached = reached.defined() ? reached.logical_or(here) : here;
  }
  return reached;
}

BackwardRows RowsOf(const at::Tensor& hidden, const UpstreamGradients& upstream,
                    const LinearLogprobInputs& inputs, const SavedOutputs& saved,
                    const LinearLogprobOptions& options) {
  const at::ScalarType wide = WideType(inputs);
  BackwardRows all;
  all.rows = RowsThatCount(hidden, inputs, options, Reached(upstream));
  const auto selected = [&](const at::Tensor& values) {
    return all.rows.Select(values.reshape({-1})).to(wide).unsqueeze(1);
  };
  if (upstream.entropy.has_value()) {
    all.weights.entropy = selected(*upstream.entropy);
    all.entropy = selected(saved.entropy);
  }
  if (upstream.mean_logit.has_value()) all.weights.mean = selected(*upstream.mean_logit);
  all.weights.free = at::zeros({all.rows.size(), 1}, hidden.options().dtype(wide));
  if (upstream.lse.has_value()) all.weights.free = selected(*upstream.lse);
  if (upstream.logprob.has_value()) {
    all.weights.target = selected(*upstream.logprob);
    all.weights.free = all.weights.free - all.weights.target;
  }
  all.scale = PerTemperature(1, all.rows, options, wide);
  // Logits are taken relative to it, since where they are large lse and 1 / temperature, once
  // rounded, would differ by more than the probabilities may.
  const at::Tensor exact_scale = PerTemperature(1, all.rows, options, at::kDouble);
  const at::Tensor lse = (saved.lse.to(at::kDouble) + saved.lse_rest).reshape({-1});
  const at::Tensor exact_lse = all.rows.Select(lse).unsqueeze(1);
  all.level = (exact_lse / exact_scale).to(wide);
  all.rest = (all.level.to(at::kDouble) * exact_scale - exact_lse).to(wide);
  return all;
}

/// Gradient of the loss with respect to the dot products of a block, [n, columns]; the bias's is
/// added up in `bias`, [columns], where it is defined.
at::Tensor DotGradient(const BackwardRows& all, const LinearLogprobInputs& inputs,
                       const LinearLogprobOptions& options, const Shard& shard, Columns columns,
                       at::Tensor& bias) {
  const at::ScalarType wide = WideType(inputs);
  const at::Tensor logits = BlockLogits(all.rows.hidden, inputs, options, columns, wide);
  const at::Tensor log_p = (logits - all.level).mul_(all.scale).add_(all.rest);
  at::Tensor factor = all.weights.free;
  if (all.weights.entropy.defined()) {
    factor = factor - all.weights.entropy * (log_p + all.entropy);
  }
  const at::Tensor p = log_p.exp();
  // A probability of 0 has no part, though its logarithm be infinite.
  at::Tensor gradient = at::where(p == 0, 0, p * factor);
  if (all.weights.target.defined()) {
    const auto [column, is_here] =
        FindTargets(all.rows, shard.begin + columns.begin, columns.size());
    gradient.scatter_add_(1, column.unsqueeze(1), all.weights.target * is_here.unsqueeze(1));
  }
  if (all.weights.mean.defined()) {
    gradient.add_(all.weights.mean * shard.ColumnWeights(inputs, columns).to(wide));
  }
  gradient.mul_(all.scale);
  if (options.softcap > 0) {
    const at::Tensor t = logits / options.softcap;
    gradient.mul_(1 - t * t);  // the derivative of tanh
  }
  if (bias.defined()) bias.add_(gradient.sum(0));
  if (options.scale != 1) gradient.mul_(options.scale);
  return gradient;
}

/// In the dtype of hidden and weight where a GPU multiplies these as they are.
at::Tensor ForProduct(const at::Tensor& gradient, const LinearLogprobInputs& inputs) {
  return IsMultipliedAsIs(inputs.hidden, inputs.weight) ? gradient.to(inputs.weight.scalar_type())
                                                        : gradient;
}

/// The sums of gradients so far; undefined: not needed.
struct Sums {
  at::Tensor hidden;  ///< [n, H] in `wide`
  at::Tensor weight;  ///< [V, H]
  at::Tensor bias;    ///< [V]
};

void AddBlock(const BackwardRows& all, const LinearLogprobInputs& inputs,
              const LinearLogprobOptions& options, const Shard& shard, Columns columns,
              Sums& sums) {
  const at::ScalarType wide = WideType(inputs);
  at::Tensor bias;
  if (sums.bias.defined()) bias = sums.bias.narrow(0, columns.begin, columns.size());
  const at::Tensor gradient = DotGradient(all, inputs, options, shard, columns, bias);
  if (sums.hidden.defined()) {
    const at::Tensor weight = inputs.weight.narrow(0, columns.begin, columns.size());
    sums.hidden.add_(WideProduct(ForProduct(gradient, inputs), weight, wide));
  }
  if (sums.weight.defined()) {
    const at::Tensor product = WideProduct(ForProduct(gradient, inputs).t(), all.rows.hidden, wide);
    sums.weight.narrow(0, columns.begin, columns.size()).add_(product);
  }
}

BackwardRows BlockOf(const BackwardRows& all, int64_t begin) {
  const int64_t size = std::min(kBlockRows, all.rows.size() - begin);
  const auto part = [&](const at::Tensor& values) {
    return values.defined() ? values.narrow(0, begin, size) : values;
  };
  BackwardRows block;
  block.rows = all.rows.Part(begin, size);
  block.weights = {part(all.weights.free), part(all.weights.entropy), part(all.weights.target),
                   part(all.weights.mean)};
  block.level = part(all.level);
  block.rest = part(all.rest);
  block.entropy = part(all.entropy);
  block.scale = part(all.scale);
  return block;
}

void CheckWeightGrad(const std::optional<at::Tensor>& weight_grad, const at::Tensor& weight) {
  TORCH_CHECK_VALUE(!weight_grad.has_value() || (weight_grad->sizes() == weight.sizes() &&
                                                 weight_grad->scalar_type() == at::kFloat),
                    "weight_grad must be float32 and have the shape of weight, ", weight.sizes());
}

}  // namespace

InputGradients Backward(const UpstreamGradients& upstream, const LinearLogprobInputs& inputs,
                        const SavedOutputs& saved, const LinearLogprobOptions& options,
                        GradientNeeds needs, const std::optional<at::Tensor>& weight_grad) {
  // Dtypes are those written here, whatever autocast would make of them.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const RankGroup group(options.group);
  const at::Device device = inputs.hidden.device();
  const at::ScalarType wide = WideType(inputs);
  group.CheckSame(device, {needs.hidden});
  const Shard shard(inputs, options, group);
  at::Tensor hidden = inputs.hidden.reshape({-1, inputs.hidden.size(-1)});
  if (options.sequence_parallel) hidden = group.Gather(hidden);

  Sums sums;
  BackwardRows all;
  group.Together(device, [&] {
    CheckDevices(inputs, weight_grad);
    CheckWeightGrad(weight_grad, inputs.weight);
    all = RowsOf(hidden, upstream, inputs, saved, options);
    const auto sums_options = hidden.options().dtype(wide);
    if (needs.hidden) sums.hidden = at::zeros(all.rows.hidden.sizes(), sums_options);
    if (needs.weight) {
      // Written once, it needs no wider sum.
      const bool is_one_block = all.rows.size() <= kBlockRows;
      sums.weight = weight_grad.has_value()
                        ? *weight_grad
                        : at::zeros(inputs.weight.sizes(),
                                    is_one_block ? inputs.weight.options() : sums_options);
    }
    if (needs.bias) sums.bias = at::zeros({inputs.weight.size(0)}, sums_options);
    for (int64_t begin = 0; begin < all.rows.size(); begin += kBlockRows) {
      const BackwardRows block = BlockOf(all, begin);
      Sums block_sums = sums;
      if (needs.hidden) block_sums.hidden = sums.hidden.narrow(0, begin, block.rows.size());
      for (const Columns& columns : CutColumns(shard.columns, shard.begin, block.rows.size())) {
        AddBlock(block, inputs, options, shard, columns, block_sums);
      }
    }
  });

  const auto none = [](const at::Tensor& like) { return at::empty({0}, like.options()); };
  InputGradients gradients = {none(inputs.hidden), none(inputs.weight),
                              none(inputs.bias.value_or(inputs.weight))};
  if (needs.hidden) {
    at::Tensor spread = all.rows.Spread(sums.hidden);
    if (options.sequence_parallel) {
      spread = group.SumScattered(spread);
    } else {
      group.Sum(spread);
    }
    gradients.hidden = spread.to(inputs.hidden.scalar_type()).view(inputs.hidden.sizes());
  }
  if (needs.weight && !weight_grad.has_value()) {
    gradients.weight = sums.weight.to(inputs.weight.scalar_type());
  }
  if (needs.bias) gradients.bias = sums.bias.to(inputs.bias->scalar_type());
  return gradients;
}

}  // namespace logprobd::torch_ops
