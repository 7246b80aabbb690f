#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "kernels/torch_ops/backward_rows.h"
#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/products.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/rows.h"
#include "kernels/torch_ops/shard.h"

namespace logprobd::torch_ops {

/// The gradients so far, of this rank's columns; undefined: not needed.
struct GradientSums {
  at::Tensor hidden;  ///< [n, H] in the wide type; written first by a row's own block.
  at::Tensor weight;  ///< [V, H]
  at::Tensor bias;    ///< [V] in the wide type.
  /// What the next rows do to that of the weight: kReplace while nothing is in it.
  Into weight_into = Into::kAddTo;
};

/// Sums of nothing yet, for `num_rows` rows. The weight's is `weight_grad` where there is one;
/// else, of rows that are added all at once, it is in its own dtype, written once.
GradientSums RoomForGradients(const LinearLogprobInputs& inputs, const Shard& shard,
                              GradientNeeds needs, const std::optional<at::Tensor>& weight_grad,
                              int64_t num_rows, bool is_added_at_once);

/// Whether so many rows are added at once.
bool AreAddedAtOnce(int64_t num_rows);

/// Adds the gradients of `all` rows, for which sums.hidden has its rows; of rows of a search, of
/// those that it finds. Of no rows, nothing is written. `when_hidden_is_added`, if any, is called
/// when all that is added to sums.hidden is enqueued, and before the last product of the weight's
/// gradient; not where there are no rows.
void AddGradients(const BackwardRows& all, const LinearLogprobInputs& inputs,
                  const LinearLogprobOptions& options, const Shard& shard, GradientSums& sums,
                  const std::function<void()>& when_hidden_is_added = {});

/// Takes the memory of the sum for all rows' hidden states and gives it back to Torch's allocator,
/// where StartHiddenSum finds it.
void ReserveHiddenSum(const LinearLogprobInputs& inputs);

/// Starts the sum over the ranks of the gradient of hidden, of which `hidden` [n, H] is that of
/// `rows`; other rows have exact zeros.
RankGroup::PendingSum StartHiddenSum(const at::Tensor& hidden, const Rows& rows,
                                     const LinearLogprobInputs& inputs,
                                     const LinearLogprobOptions& options, const RankGroup& group);

/// The gradients of the inputs. What is not needed has no elements; `hidden_sum` is absent then.
InputGradients GradientsOf(const std::optional<RankGroup::PendingSum>& hidden_sum,
                           const GradientSums& sums, const LinearLogprobInputs& inputs);

}  // namespace logprobd::torch_ops
