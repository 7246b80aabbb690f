#include "kernels/torch_ops/row_terms.h"

#include <ATen/ops/zeros.h>

#include "kernels/torch_ops/logits.h"

namespace logprobd::torch_ops {

RowTerms TermsOf(const BackwardRows& all, const LinearLogprobInputs& inputs,
                 const LinearLogprobOptions& options) {
  const at::ScalarType wide = WideType(inputs);
  const Rows& rows = all.rows;
  RowTerms terms;
  const auto selected = [&](const at::Tensor& values) {
    return rows.Select(values.reshape({-1})).to(wide).unsqueeze(1);
  };
  if (all.upstream.entropy.has_value()) {
    terms.d_entropy = selected(*all.upstream.entropy);
    terms.entropy = selected(all.saved.entropy);
  }
  if (all.upstream.mean_logit.has_value()) terms.mean = selected(*all.upstream.mean_logit);
  terms.free = at::zeros({rows.size(), 1}, rows.hidden.options().dtype(wide));
  if (all.upstream.lse.has_value()) terms.free = selected(*all.upstream.lse);
  if (all.upstream.logprob.has_value()) {
    terms.target = selected(*all.upstream.logprob);
    terms.free = terms.free - terms.target;
  }
  terms.scale = PerTemperature(1, rows, options, wide);
  // Logits are taken relative to it, since where they are large lse and 1 / temperature, once
  // rounded, would differ by more than the probabilities may.
  const at::Tensor exact_scale = PerTemperature(1, rows, options, at::kDouble);
  const at::Tensor lse = (all.saved.lse.to(at::kDouble) + all.saved.lse_rest).reshape({-1});
  const at::Tensor exact_lse = rows.Select(lse).unsqueeze(1);
  terms.level = (exact_lse / exact_scale).to(wide);
  terms.rest = (terms.level.to(at::kDouble) * exact_scale - exact_lse).to(wide);
  return terms;
}

}  // namespace logprobd::torch_ops
