#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/logits.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/row_selection.h"

namespace logprobd::torch_ops {

/// This rank's part of the vocabulary: ids [begin, begin + columns) of vocab_size.
struct Shard {
  /// `end`: behind the ids that any rank has. Throws c10::ValueError where vocab_valid is beyond
  /// it, or it beyond what is served.
  Shard(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options, int64_t end);

  /// Weights of the mean logit for some of the columns, fp64.
  at::Tensor MeanLogitWeights(const LinearLogprobInputs& inputs, Columns columns_wanted) const;

  /// The ids that count.
  IdRange ids() const { return {begin, begin + columns}; }

  int64_t begin = 0;
  int64_t columns = 0;     ///< Rows of the weight that count: padding behind them does not.
  int64_t vocab_size = 0;  ///< Of the whole vocabulary.
};

/// The ids of this rank's weight, padding too.
IdRange IdsOfShard(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options);

/// This rank's part, before it knows the others': with the vocabulary's size as far as it can tell.
Shard ShardSoFar(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options);

/// Throws c10::ValueError where two parts of the vocabulary have the same id.
void CheckParts(std::vector<IdRange> parts);

/// Whether each id of `targets` is known to be in one of `parts`. Without a look at the targets
/// between the least and the greatest: false may be wrong.
bool AreOwned(IdRange targets, std::vector<IdRange> parts);

/// The rows of `inputs` that count in a forward pass, or those of them that `upstream` reaches.
/// Throws c10::IndexError for a target that is not in the shard of a rank that is alone, unless the
/// search is under way: CheckOwned does then. A group's are known later (AreOwned, CheckOwners).
RowSelection SelectCountedRows(const LinearLogprobInputs& inputs,
                               const LinearLogprobOptions& options, const RankGroup& group,
                               const UpstreamGradients& upstream, Search search = Search::kAwaited);

}  // namespace logprobd::torch_ops
