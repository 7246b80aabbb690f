#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/logits.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/rows.h"

namespace logprobd::torch_ops {

/// This rank's part of the vocabulary: ids [begin, begin + columns) of vocab_size.
struct Shard {
  /// Ranks of `group` agree on vocab_size: call it on all of them.
  Shard(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
        const RankGroup& group);

  /// Weights of the mean logit for some of the columns, fp64.
  at::Tensor ColumnWeights(const LinearLogprobInputs& inputs, Columns columns_wanted) const;

  int64_t begin = 0;
  int64_t columns = 0;     ///< Rows of the weight that count: padding behind them does not.
  int64_t vocab_size = 0;  ///< Of the whole vocabulary.
};

/// The rows of `inputs` that count in a forward pass (RowsThatCount). Throws c10::IndexError for a
/// target that is not in the shard of a rank that is alone; a group's are known later
/// (CheckOwners).
Rows CountedRows(const at::Tensor& hidden, const LinearLogprobInputs& inputs,
                 const LinearLogprobOptions& options, const Shard& shard, const RankGroup& group);

}  // namespace logprobd::torch_ops
