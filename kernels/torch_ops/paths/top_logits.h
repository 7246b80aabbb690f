#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>

#include "kernels/torch_ops/ranks/rank_group.h"

namespace logprobd::torch_ops {

/// Stands for an id where there is none, and is larger than every id.
inline constexpr int64_t kNoColumn = std::numeric_limits<int64_t>::max();

/// The largest logits of each row, best first, and their ids, [n, <= count] each. Among equal
/// logits, the lowest ids come first.
struct TopLogits {
  at::Tensor logits;  ///< fp64
  at::Tensor ids;     ///< int64
};

/// Returns the `top_k` largest logits of `top` and of a block of logits, [n, columns], whose first
/// column has the id `first`. The ids of `top` are lower.
TopLogits AddToTop(const TopLogits& top, const at::Tensor& logits, int64_t first, int64_t top_k);

/// Merges the lists of all ranks. The results have `top_k` entries; those behind the last id have
/// kNoColumn.
TopLogits MergeTop(const TopLogits& mine, int64_t top_k, const RankGroup& group);

}  // namespace logprobd::torch_ops
