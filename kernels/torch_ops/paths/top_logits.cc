#include "kernels/torch_ops/paths/top_logits.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/sort.h>

#include <algorithm>
#include <tuple>

namespace logprobd::torch_ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Returns the first `count` entries of each row, by descending logits. Entries with equal logits
/// keep their order.
TopLogits SortTop(const TopLogits& unsorted, int64_t count) {
  const auto [logits, order] =
      at::sort(unsorted.logits, /*stable=*/true, /*dim=*/1, /*descending=*/true);
  count = std::min(count, logits.size(1));
  return {logits.narrow(1, 0, count), unsorted.ids.gather(1, order.narrow(1, 0, count))};
}

/// Returns the columns of the `count` largest values of each row, ascending; [n, count]. Among
/// equal values, the lowest columns are chosen.
at::Tensor LargestColumns(const at::Tensor& values, int64_t count) {
  const int64_t num_columns = values.size(1);
  // topk chooses arbitrary columns among equal values, so only its smallest value is used.
  const at::Tensor least = std::get<0>(values.topk(count, 1)).narrow(1, count - 1, 1);
  const at::Tensor is_larger = values > least;
  const at::Tensor is_equal = values == least;
  const at::Tensor num_equal = is_larger.sum(1, /*keepdim=*/true).neg_().add_(count);
  const at::Tensor is_chosen =
      is_equal.cumsum(1).le(num_equal).logical_and_(is_equal).logical_or_(is_larger);
  const at::Tensor from_end =
      at::arange(num_columns, 0, -1, values.options().dtype(at::kInt)).mul(is_chosen);
  const at::Tensor columns = num_columns - std::get<0>(from_end.topk(count, 1)).to(at::kLong);
  return columns.clamp_max_(num_columns - 1);  // Fewer are chosen if a value is NaN.
}

}  // namespace

TopLogits AddToTop(const TopLogits& top, const at::Tensor& logits, int64_t first, int64_t top_k) {
  const at::Tensor columns = LargestColumns(logits, std::min(top_k, logits.size(1)));
  const at::Tensor best = logits.gather(1, columns).to(at::kDouble);
  return SortTop({at::cat({top.logits, best}, 1), at::cat({top.ids, columns + first}, 1)}, top_k);
}

TopLogits MergeTop(const TopLogits& mine, int64_t top_k, const RankGroup& group) {
  const int64_t num_missing = top_k - mine.ids.size(1);
  TopLogits merged = {at::constant_pad_nd(mine.logits, {0, num_missing}, -kInfinity),
                      at::constant_pad_nd(mine.ids, {0, num_missing}, kNoColumn)};
  if (group.size() == 1) return merged;
  const auto gather = [&](const at::Tensor& lists) {
    const at::Tensor all = group.Gather(lists).view({group.size(), -1, top_k});
    return all.permute({1, 0, 2}).reshape({-1, group.size() * top_k});
  };
  const auto [ids, order] = gather(merged.ids).sort(1);
  return SortTop({gather(merged.logits).gather(1, order), ids}, top_k);
}

}  // namespace logprobd::torch_ops
