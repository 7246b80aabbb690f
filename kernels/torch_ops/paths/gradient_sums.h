#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "kernels/torch_ops/paths/listed_gradients.h"
#include "kernels/torch_ops/paths/logits.h"
#include "kernels/torch_ops/paths/problem.h"
#include "kernels/torch_ops/paths/scoring_path.h"
#include "kernels/torch_ops/ranks/rank_group.h"
#include "kernels/torch_ops/types/linear_logprob.h"

namespace logprobd::torch_ops {

/// Sums of gradients over rows, for this rank's columns. A tensor that is not needed is undefined.
struct GradientSums {
  /// [n, H]; each block of rows writes its own rows. In the wide dtype, or in the dtype of hidden
  /// if the sum of each block is rounded as soon as it is complete.
  at::Tensor hidden;
  at::Tensor weight;  ///< [V, H]
  at::Tensor bias;    ///< [V] in the wide dtype.
  /// How the next rows are combined with `weight`: kReplace while it is unwritten.
  Into weight_into = Into::kAddTo;
};

/// Allocates the sums for `num_rows` rows. The weight's sum is `weight_grad` if given; otherwise,
/// when all rows are added at once, it has the weight's dtype. When they are not and no other rank
/// adds to hidden's sum, that sum has the dtype of hidden.
GradientSums AllocateSums(const Problem& problem, GradientNeeds needs,
                          const MaybeTensor& weight_grad, int64_t num_rows, bool is_added_at_once);

/// Returns whether AddGradients can add `num_rows` rows to a sum that has the weight's dtype.
bool AreAddedAtOnce(int64_t num_rows);

/// Adds the gradients of `all` rows. sums.hidden has one row for each of them. When a row
/// compaction is pending, adds the rows that it finds. Writes nothing when there are no rows. Calls
/// `when_hidden_is_complete` (if any, and if there are rows) as soon as all additions to
/// sums.hidden are enqueued, before the last product of the weight's gradient; it returns whether
/// it has started a sum over the ranks. `listed` is prepared for these rows.
void AddGradients(const BackwardRows& all, const Problem& problem, GradientSums& sums,
                  const ListedGradients& listed = {},
                  const std::function<bool()>& when_hidden_is_complete = {});

/// Allocates and frees what StartHiddenSum will allocate, so that an out-of-memory error occurs
/// before ranks wait for each other.
void ReserveHiddenSum(const Problem& problem);

/// Starts to sum the gradient of hidden over the ranks, unless the caller does so
/// (options.parallel.partial_hidden_gradient). `hidden`, [n, H], has the rows at `row_indices`, or
/// all rows if undefined; the other rows are exact zeros.
RankGroup::PendingSum StartHiddenSum(const at::Tensor& hidden, const at::Tensor& row_indices,
                                     const Problem& problem);

/// Converts the sums to gradients of the inputs. `hidden_sum` is absent if hidden needs none.
InputGradients ToInputGradients(const std::optional<RankGroup::PendingSum>& hidden_sum,
                                const GradientSums& sums, const LinearLogprobInputs& inputs);

}  // namespace logprobd::torch_ops
