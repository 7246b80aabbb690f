#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/torch_ops/paths/problem.h"
#include "kernels/torch_ops/rows/listed_pairs.h"
#include "kernels/torch_ops/rows/shard.h"
#include "kernels/torch_ops/rows/valid_rows.h"
#include "kernels/torch_ops/types/linear_logprob.h"

namespace logprobd::torch_ops {

/// The gradients of listed log-probabilities l_j = x_j - lse. An upstream gradient d_j adds d_j to
/// dx_j and subtracts d_j from d_lse. The part of d_lse is passed on to the gradients of all
/// columns. The listed elements of the gradient are then replaced by their exact values, because
/// both parts may nearly cancel, and the part of all columns may have been rounded to 16 bits.
class ListedGradients {
 public:
  /// No listed log-probabilities.
  ListedGradients() = default;
  ListedGradients(const UpstreamGradients& upstream, const SavedOutputs& saved,
                  const Problem& problem);

  bool has_any() const { return pairs_.defined(); }

  /// Returns the upstream gradients of the scores per row, including the part of d_lse.
  const UpstreamGradients& upstream_of_rows() const { return upstream_; }
  /// Returns upstream gradients that are not 0 in every row that has a gradient.
  const UpstreamGradients& deciding() const { return deciding_; }

  /// Computes the elements' values for the rows of `subset`, which must not be pending. The size of
  /// the vocabulary must be known if the mean logit has an upstream gradient.
  void Prepare(const RowSubset& subset, const SavedOutputs& saved, const Problem& problem);

  /// Replaces the listed elements of `gradient`, the gradient of the dot products of these columns
  /// and of the rows from `row_begin` on. Prepare must have been called.
  void Write(at::Tensor gradient, Columns columns, int64_t row_begin) const;

  /// Adds the part that the gradient of all columns lacks to the gradient of the bias, [V].
  void AddToBias(at::Tensor bias_sum) const;

 private:
  UpstreamGradients upstream_;
  UpstreamGradients deciding_;
  ListedPairs pairs_;      // rows of all rows; ids counted from the shard's first column
  at::Tensor log_p_;       // fp64 [N]
  at::Tensor is_counted_;  // bool [N]: false in ignored rows and without an id
  at::Tensor d_logprobs_;  // fp64 [N], 0 where not counted
  // Set by Prepare.
  ListedPairs positions_;  // as pairs_, with rows counted among those of the subset, or -1
  at::Tensor elements_;    // fp64 [N]: gradients of the dot products
  at::Tensor bias_parts_;  // fp64 [N]: listed part of the gradients of the logits
};

}  // namespace logprobd::torch_ops
