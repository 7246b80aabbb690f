#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/row_selection.h"

namespace logprobd::torch_ops {

/// The rows that are computed, one after another, and where they stand among all.
struct Rows {
  at::Tensor hidden;       ///< [n, H]
  at::Tensor all_targets;  ///< [num_all], int64
  at::Tensor temperature;  ///< [n] or undefined: options.temperature.
  at::Tensor index;        ///< [n], int64, places in `all_targets`; undefined: all rows.
  int64_t num_all = 0;     ///< Rows of the operator's target.
  /// Rows whose target is not among the ids that were asked for; of a search not known yet.
  int64_t num_out_of_vocab = 0;
  /// Each target is known to be in one rank's shard, of several ranks.
  bool are_owned = false;
  /// All rows were taken without a look at them: ignored ones too, and targets that nobody owns.
  bool are_unchecked = false;
  /// Not ended, or null: these are places for all rows, and only its first ones are computed.
  std::shared_ptr<RowCompaction> search;

  int64_t size() const { return hidden.size(0); }
  at::Tensor target() const;  ///< [n], int64
  /// What the search has found, for which it waits; without one, these.
  Rows Resolved() const;
  /// Values of these rows in the place of all rows; 0 for the others.
  at::Tensor Spread(const at::Tensor& values) const;
  /// `size` of these rows from `begin` on; they know their places. All, while a search is under
  /// way.
  Rows Part(int64_t begin, int64_t size) const;
  /// Those of these rows, of `values` of all rows, [num_all, ...].
  at::Tensor Select(const at::Tensor& values) const;
};

/// Where each row's target stands among ids [first, first + count).
struct TargetPlaces {
  at::Tensor column;   ///< [n], int64; any where it is not there.
  at::Tensor is_here;  ///< [n], bool
};
TargetPlaces FindTargets(const Rows& rows, int64_t first, int64_t count);

/// Throws c10::ValueError, naming the argument, where shapes, dtypes or options do not fit.
void CheckArguments(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                    const RankGroup& group);

/// [rows of target, H]; ranks that hold parts of the rows gather them: they call it together.
at::Tensor HiddenOfAllRows(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                           const RankGroup& group);

/// All targets, [rows], int64.
at::Tensor FlatTarget(const LinearLogprobInputs& inputs);

/// The selected rows of `inputs`, or those that a search will have found; `hidden` is that of all
/// rows of target, [num_all, H].
Rows RowsOf(const RowSelection& selection, const at::Tensor& hidden,
            const LinearLogprobInputs& inputs);

/// Throws c10::IndexError, naming the first row, where selected targets, of all `target` [rows],
/// are not owned by any rank, unless that is zero by the options.
void CheckOwned(const RowSelection& selection, const at::Tensor& target,
                const LinearLogprobOptions& options, int64_t vocab_size);

/// What must be the same on every rank of a group; each does as many collectives of equal sizes
/// then. `selection` is that of a forward pass.
std::vector<int64_t> CommonArguments(const LinearLogprobInputs& inputs,
                                     const LinearLogprobOptions& options,
                                     const RowSelection& selection);

/// `owners`, int64 [n], says how many ranks have each row's target. Throws c10::IndexError, naming
/// the first row, where none has unless that is zero by the options. Waits for a GPU.
void CheckOwners(const Rows& rows, const at::Tensor& owners, const LinearLogprobInputs& inputs,
                 const LinearLogprobOptions& options, int64_t vocab_size);

/// What sums and gradients are held in: double where hidden or weight are, else fp32.
at::ScalarType WideType(const LinearLogprobInputs& inputs);

}  // namespace logprobd::torch_ops
