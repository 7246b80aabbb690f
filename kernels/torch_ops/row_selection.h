#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/rows.h"

namespace logprobd::torch_ops {

struct RowSelection {
  at::Tensor index;           ///< int64, rising; undefined: all rows.
  int64_t num_unowned = 0;    ///< Selected ones whose target is outside of the ids.
  int64_t first_unowned = 0;  ///< The first of them.
  bool are_unseen = false;    ///< Nobody looked: all rows.
};

/// The rows whose target, [all rows] int64, is not `ignore_index` and that a gradient reaches: with
/// no upstream gradient at all, any row. See RowsThatCount.
RowSelection SelectRows(const at::Tensor& target, int64_t ignore_index,
                        const UpstreamGradients& upstream, IdRange owned);

}  // namespace logprobd::torch_ops
