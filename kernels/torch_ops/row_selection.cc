#include "kernels/torch_ops/row_selection.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/nonzero.h>

#include "kernels/torch_ops/fused_row_selection.h"

namespace logprobd::torch_ops {
namespace {

/// bool [all rows]: any upstream gradient is not zero; undefined without one.
at::Tensor Reached(const UpstreamGradients& upstream) {
  at::Tensor reached;
  for (const auto score : kScores) {
    const std::optional<at::Tensor>& gradient = upstream.*score;
    if (!gradient.has_value()) continue;
    const at::Tensor here = gradient->reshape({-1}) != 0;
    reached = reached.defined() ? reached.logical_or(here) : here;
  }
  return reached;
}

}  // namespace

RowSelection RowSelection::Resolved() const { return search == nullptr ? *this : search->Result(); }

RowSelection CompactRows(const at::Tensor& target, int64_t ignore_index,
                         const UpstreamGradients& upstream, IdRange owned, Search search) {
  if (IsCaptured(target.device())) return {.are_unchecked = true};
  if (const auto started = StartRowCompaction(target, ignore_index, upstream, owned, search)) {
    return search == Search::kUnderWay ? RowSelection{.search = started} : started->Result();
  }
  at::Tensor counts = target != ignore_index;
  RowSelection selection;
  if (const at::Tensor reached = Reached(upstream); reached.defined()) {
    selection.has_all_counted = reached.logical_or(counts.logical_not()).all().item<bool>();
    counts.logical_and_(reached);
  }
  const at::Tensor index = at::nonzero(counts).squeeze(1);
  if (index.size(0) < target.size(0)) selection.index = index;
  const at::Tensor is_out_of_vocab =
      counts.logical_and(target.lt(owned.begin) + target.ge(owned.end));
  const at::Tensor unowned = at::nonzero(is_out_of_vocab).squeeze(1);
  selection.num_out_of_vocab = unowned.size(0);
  if (selection.num_out_of_vocab > 0) selection.first_out_of_vocab = unowned[0].item<int64_t>();
  if (index.size(0) > 0) {
    const auto [least, greatest] = target.index_select(0, index).aminmax();
    selection.targets = IdRange::From(least.item<int64_t>(), greatest.item<int64_t>());
  }
  const at::Tensor row_indices = at::arange(1, target.size(0) + 1, target.options());
  selection.target_checksum = (target * row_indices).sum().item<int64_t>();
  return selection;
}

}  // namespace logprobd::torch_ops
