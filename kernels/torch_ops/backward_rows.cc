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

BackwardRows Known(const Rows& rows, const UpstreamGradients& upstream,
                   const LinearLogprobInputs& inputs, const SavedOutputs& saved,
                   const LinearLogprobOptions& options) {
  return {rows, FindCachedRows(saved.cache, rows, inputs, options), upstream, saved};
}

}  // namespace

BackwardRows BackwardRows::Part(int64_t begin, int64_t size) const {
  return {rows.Part(begin, size), cached.Part(begin, size), upstream, saved};
}

BackwardRows RowsReached(const std::shared_ptr<RowSearch>& search, const at::Tensor& hidden,
                         const UpstreamGradients& upstream, const LinearLogprobInputs& inputs,
                         const SavedOutputs& saved, const LinearLogprobOptions& options) {
  return Known(RowsOf(search, hidden, inputs), upstream, inputs, saved, options);
}

BackwardRows RowsReached(const RowSelection& reached, const at::Tensor& hidden,
                         const UpstreamGradients& upstream, const LinearLogprobInputs& inputs,
                         const SavedOutputs& saved, const LinearLogprobOptions& options) {
  BackwardRows all = Known(RowsOf(reached, hidden, inputs), upstream, inputs, saved, options);
  if (all.rows.are_unseen) Clear(all.upstream, all.rows.target() == options.ignore_index);
  return all;
}

}  // namespace logprobd::torch_ops
