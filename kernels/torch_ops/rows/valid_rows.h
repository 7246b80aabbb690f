#pragma once

// Valid rows are those whose target is not ignore_index. Row compaction finds the row indices of
// the valid rows that a pass computes; only these rows cost anything.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "kernels/torch_ops/api/linear_logprob.h"
#include "kernels/torch_ops/api/problem.h"
#include "kernels/torch_ops/rows/shard.h"

namespace logprobd::torch_ops {

// Each view takes some microseconds of the host, and an idle GPU waits for them before its first
// kernel. Both functions return the tensor itself when a view would leave nothing out.

/// All elements in one dimension.
inline at::Tensor Flat(const at::Tensor& values) {
  return values.dim() == 1 ? values : values.reshape({-1});
}

/// Rows [begin, begin + size).
inline at::Tensor SliceRows(const at::Tensor& values, int64_t begin, int64_t size) {
  return begin == 0 && size == values.size(0) ? values : values.narrow(0, begin, size);
}

class PendingCompaction;

/// The result of a row compaction: the rows that a pass computes, as a subset of all rows.
struct RowSubset {
  /// Not null: the compaction still runs, and the other members are not known yet.
  std::shared_ptr<PendingCompaction> pending = nullptr;
  at::Tensor row_indices = {};      ///< int64, ascending; undefined: all rows.
  bool has_every_valid_row = true;  ///< No valid row is missing for lack of a gradient.
  int64_t num_out_of_vocab = 0;     ///< Rows whose target is outside the given ids.
  int64_t first_out_of_vocab = 0;   ///< Row index of the first such row.
  IdRange targets = {0, 0};         ///< From the smallest to the largest target; may be empty.
  int64_t target_checksum = 0;      ///< Sum of (i + 1) * target[i] over all rows, modulo 2^64.
  /// The targets could not be read (CUDA-graph capture): the subset is all rows, ignored rows and
  /// out-of-vocabulary targets included, and the other members keep their defaults.
  bool is_unchecked = false;

  /// Number of rows, of `num_all` rows; while the compaction runs, an upper bound.
  int64_t size(int64_t num_all) const {
    return row_indices.defined() ? row_indices.size(0) : num_all;
  }
  /// The subset itself, or the result of the pending compaction, for which it waits.
  RowSubset Resolved() const;
};

/// A row compaction that runs on a GPU. Kernels enqueued behind it can use its row indices before
/// the host knows how many there are: buffers have space for all rows, and valid rows come first.
class PendingCompaction {
 public:
  virtual ~PendingCompaction() = default;

  /// int64 [all rows], on the GPU: the row indices of the subset, ascending, then zeros.
  virtual at::Tensor row_indices() const = 0;
  /// int64 [all rows], on the GPU: for each row of the subset, the number of valid rows before it;
  /// then zeros. Only for Wait::kLater.
  virtual at::Tensor valid_indices() const = 0;
  /// The rows of `values`, [all rows, H], at row_indices(). The result's memory ends on a whole
  /// tile: the fused kernels are slower when it ends inside one.
  virtual at::Tensor Gather(const at::Tensor& values) const = 0;
  /// The number of rows in the subset, in GPU memory.
  virtual const int64_t* count() const = 0;
  /// Waits for the compaction, but not for work that was enqueued behind it.
  virtual const RowSubset& Result() = 0;
};

/// When the caller of a row compaction waits for its result.
enum class Wait {
  kNow,    ///< Before the call returns.
  kLater,  ///< When it calls RowSubset::Resolved; until then kernels read RowSubset::pending.
};

/// Finds the valid rows of `target`, int64 [all rows], that a gradient reaches; without any
/// upstream gradient, all valid rows. Counts targets outside `ids` as out-of-vocabulary. Waits for
/// the GPU unless `wait` is kLater and a kernel does the work, or unless a CUDA graph captures
/// (RowSubset::is_unchecked).
RowSubset CompactRows(const Problem& problem, const at::Tensor& target,
                      const UpstreamGradients& upstream, IdRange ids, Wait wait = Wait::kNow);

/// CompactRows for a forward pass. Throws c10::IndexError for an out-of-vocabulary target when this
/// rank is alone and the result is known; otherwise CheckTargets or CheckTargetOwners do so later.
RowSubset CompactValidRows(const Problem& problem, const UpstreamGradients& upstream, Wait wait);

/// All targets, int64 [all rows].
at::Tensor FlatTarget(const LinearLogprobInputs& inputs);

/// The rows that a pass computes, one after another, and their position among all rows.
struct Rows {
  at::Tensor hidden;                 ///< [n, H]
  at::Tensor all_targets;            ///< [num_all], int64
  at::Tensor temperature;            ///< [n]; undefined: options.temperature.
  at::Tensor row_indices;            ///< [n], int64, into all_targets; undefined: all rows.
  int64_t num_all = 0;               ///< Number of all rows.
  int64_t num_out_of_vocab = 0;      ///< See RowSubset; 0 while the compaction runs.
  bool are_targets_covered = false;  ///< Every target certainly lies in the shard of some rank.
  bool is_unchecked = false;         ///< See RowSubset.
  /// Not null: the compaction still runs. There are as many rows as targets, and kernels compute
  /// only the first ones.
  std::shared_ptr<PendingCompaction> pending;

  int64_t size() const { return hidden.size(0); }
  at::Tensor target() const;  ///< [n], int64
  /// These rows, or those that the pending compaction finds, for which it waits.
  Rows Resolved() const;
  /// `values` of these rows as values of all rows; the other rows hold 0.
  at::Tensor ScatterToAll(const at::Tensor& values) const;
  /// These rows out of `values` of all rows, [num_all, ...].
  at::Tensor GatherFromAll(const at::Tensor& values) const;
  /// Rows [begin, begin + size). While the compaction runs only all rows can be taken.
  Rows Slice(int64_t begin, int64_t size) const;
};

/// The rows of `subset`, complete or pending. `hidden` has all rows, [num_all, H].
Rows GatherRows(const RowSubset& subset, const at::Tensor& hidden,
                const LinearLogprobInputs& inputs);

/// Hidden states of all rows, [num_all, H]. With sequence parallelism the ranks of the group
/// gather them, so they call it together.
at::Tensor HiddenOfAllRows(const Problem& problem);

/// The column of each row's target within ids [first, first + count).
struct TargetColumns {
  at::Tensor column;       ///< [n], int64; an arbitrary valid column when the target is elsewhere.
  at::Tensor is_in_range;  ///< [n], bool
};
TargetColumns FindTargets(const Rows& rows, int64_t first, int64_t count);

/// Throws c10::IndexError, naming the first row, when targets of the subset are
/// out-of-vocabulary, unless the options allow them. `target` has all rows.
void CheckTargets(const RowSubset& subset, const at::Tensor& target, const Problem& problem);

/// As CheckTargets, from the number of ranks that have each row's target, int64 [n]. Waits for the
/// GPU.
void CheckTargetOwners(const Rows& rows, const at::Tensor& num_owners, const Problem& problem);

}  // namespace logprobd::torch_ops
