#include "kernels/torch_ops/backward_rows.h"

namespace logprobd::torch_ops {
namespace {

/// Sets the gradients of some rows, bool [all rows], to 0.
void Clear(UpstreamGradients& upstream, const at::Tensor& rows) {
  for (const auto score : kScores) {
    std::optional<at::Tensor>& gradient = upstream.*score;
    if (gradient.has_value()) gradient = gradient->reshape({-1}).masked_fill(rows, 0);
  }
}

}  // namespace

BackwardRows BackwardRows::Part(int64_t begin, int64_t size) const {
  return {rows.Part(begin, size), cached.Part(begin, size), upstream, saved};
}

BackwardRows RowsReached(const RowSelection& reached, const at::Tensor& hidden,
                         const UpstreamGradients& upstream, const LinearLogprobInputs& inputs,
                         const SavedOutputs& saved, const LinearLogprobOptions& options) {
  const Rows rows = RowsOf(reached, hidden, inputs);
  BackwardRows all = {rows, FindCachedRows(saved.cache, rows, inputs, options), upstream, saved};
  if (all.rows.are_unchecked) Clear(all.upstream, all.rows.target() == options.ignore_index);
  return all;
}

}  // namespace logprobd::torch_ops
