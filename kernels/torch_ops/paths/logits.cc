#include "kernels/torch_ops/paths/logits.h"

#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/tanh.h>

#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"
#include "kernels/torch_ops/paths/cpu_scorer.h"

namespace logprobd::torch_ops {
namespace {

/// Returns `factor` / temperature as kernels/cpu rounds it: the temperature to fp32, and its
/// Log2Scale as well. Gradients then belong to the scores. fp64 [n, 1].
at::Tensor PerLog2Scale(double factor, const Rows& rows, const Problem& problem) {
  const auto fp64 = rows.hidden.options().dtype(at::kDouble);
  if (!rows.temperature.defined()) {
    const float scale = kernels::Log2Scale(static_cast<float>(problem.options.temperature));
    return at::full({rows.size(), 1}, factor * kernels::kLn2 * static_cast<double>(scale), fp64);
  }
  const at::Tensor temperature = rows.temperature.to(at::kFloat).to(at::kDouble).unsqueeze(1);
  const at::Tensor scales = at::full_like(temperature, kLog2E).div_(temperature).to(at::kFloat);
  return scales.to(at::kDouble).mul_(factor * kernels::kLn2);
}

}  // namespace

at::Tensor WideProduct(const at::Tensor& a, const at::Tensor& b, at::ScalarType wide) {
  if (IsMultipliedInSixteenBits(a, b)) return at::mm(a, b, at::kFloat);
  const at::NoTF32Guard no_tf32;
  return at::mm(a.to(wide), b.to(wide));
}

void MultiplyInto(const at::Tensor& destination, Into into, const at::Tensor& a,
                  const at::Tensor& b, at::ScalarType wide) {
  at::Tensor out = destination;
  const bool is_sixteen_bits = IsMultipliedInSixteenBits(a, b);
  const bool is_float = out.scalar_type() == at::kFloat;
  if (is_sixteen_bits && is_float && into == Into::kAddTo) {
    at::addmm_out(out, out, a, b, at::kFloat);
  } else if (is_sixteen_bits && is_float) {
    at::mm_out(out, a, b, at::kFloat);
  } else if (is_sixteen_bits && out.scalar_type() == a.scalar_type() && into == Into::kAddTo) {
    at::addmm_out(out, out, a, b);  // The sum is in fp32 and is rounded once.
  } else if (is_sixteen_bits && out.scalar_type() == a.scalar_type()) {
    at::mm_out(out, a, b);
  } else if (into == Into::kAddTo) {
    out.add_(WideProduct(a, b, wide));
  } else {
    out.copy_(WideProduct(a, b, wide));
  }
}

at::Tensor BlockLogits(const at::Tensor& hidden, const Problem& problem, Columns columns) {
  if (UsesCpuKernels(problem)) return CpuLogits(hidden, problem, columns);
  const LinearLogprobOptions& options = problem.options;
  const at::Tensor weight = problem.inputs.weight.narrow(0, columns.begin, columns.size());
  at::Tensor logits = WideProduct(hidden, weight.t(), problem.wide);
  if (options.scale != 1) logits.mul_(options.scale);
  if (problem.inputs.bias.has_value()) {
    logits.add_(problem.inputs.bias->narrow(0, columns.begin, columns.size()).to(problem.wide));
  }
  if (options.softcap <= 0) return logits;
  // The cap is computed in fp64, because three roundings to fp32 would lose more accuracy than the
  // rounding of the product.
  const double cap = options.softcap;
  return logits.to(at::kDouble).div_(cap).tanh_().mul_(cap).to(problem.wide);
}

at::Tensor PerTemperature(double factor, const Rows& rows, const Problem& problem,
                          at::ScalarType dtype) {
  if (UsesCpuKernels(problem)) return PerLog2Scale(factor, rows, problem).to(dtype);
  if (!rows.temperature.defined()) {
    return at::full({rows.size(), 1}, factor / problem.options.temperature,
                    rows.hidden.options().dtype(dtype));
  }
  const at::Tensor temperature = rows.temperature.to(at::kDouble).unsqueeze(1);
  return at::full_like(temperature, factor).div_(temperature).to(dtype);
}

at::Tensor MeanLogitWeights(const Problem& problem, Columns columns) {
  const MaybeTensor& weights = problem.inputs.mean_logit_weights;
  if (weights.has_value()) return weights->narrow(0, columns.begin, columns.size()).to(at::kDouble);
  return at::full({columns.size()}, 1.0 / static_cast<double>(problem.shard.vocab_size),
                  problem.inputs.hidden.options().dtype(at::kDouble));
}

}  // namespace logprobd::torch_ops
