#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/rows.h"
#include "kernels/torch_ops/shard.h"

namespace logprobd::torch_ops {

/// Makes sure of the memory that a rank's ScoreRows will take and the others wait for.
void ReserveRoom(const RowSelection& selection, const LinearLogprobInputs& inputs,
                 const LinearLogprobOptions& options);

/// Scores of a block of rows that are on their way: what one rank does of them for itself.
class PendingScores {
 public:
  virtual ~PendingScores() = default;

  /// The scores of these rows; of rows of a search, for which it waits, those that were found.
  /// `are_owned`: Rows::are_owned, as it is known by now, like all of `shard`. Ranks of `group`
  /// call it together. Throws as ScoreRows.
  virtual LinearLogprobOutputs Join(bool are_owned, const Shard& shard, const RankGroup& group) = 0;
};

/// Begins the scores of the first of `rows` where that is enqueuing kernels; null elsewhere. Of
/// `shard` the vocabulary's size is not looked at. `inputs` and `options` outlive what is begun.
std::unique_ptr<PendingScores> BeginScores(const Rows& rows, const LinearLogprobInputs& inputs,
                                           const LinearLogprobOptions& options, const Shard& shard,
                                           const at::Tensor& cache);

/// Scores of `rows`, [n] each, in fp64 or, by the fused kernels, fp32, but for argmax; what is not
/// needed is undefined. A block of rows and columns at a time: logits -> sums of tiles -> sums of
/// rows over all shards, in integers -> scores. The logits that options.keep_logits wants go to the
/// front of `cache` (logit_cache.h). `begun`: by BeginScores with the same arguments, or null.
///
/// Ranks call it together, with as many rows. Throws c10::IndexError for a target that none has.
LinearLogprobOutputs ScoreRows(const Rows& rows, const LinearLogprobInputs& inputs,
                               const LinearLogprobOptions& options, const Shard& shard,
                               const RankGroup& group, const at::Tensor& cache,
                               std::unique_ptr<PendingScores> begun = nullptr);

/// Those of blocks of rows, at least one, one after another.
LinearLogprobOutputs JoinScores(const std::vector<LinearLogprobOutputs>& blocks);

/// Scores of `rows` in the place of all rows, each like target, in the operator's dtypes; zeros for
/// the other rows, without elements where undefined.
LinearLogprobOutputs InPlaceOfAll(const LinearLogprobOutputs& scores, const Rows& rows,
                                  const LinearLogprobInputs& inputs,
                                  const LinearLogprobOptions& options);

}  // namespace logprobd::torch_ops
