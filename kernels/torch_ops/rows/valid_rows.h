#pragma once

// Valid rows are those whose target is not ignore_index. Row compaction finds the row indices of
// the valid rows that a pass computes. The other rows are not computed.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "kernels/torch_ops/rows/listed_pairs.h"
#include "kernels/torch_ops/rows/pass.h"
#include "kernels/torch_ops/rows/shard.h"
#include "kernels/torch_ops/types/linear_logprob.h"

namespace logprobd::torch_ops {

// Creating a view takes some microseconds on the host, during which an idle GPU waits for its first
// kernel. Both functions return the tensor itself if the view would contain all of it.

/// Returns all elements in one dimension.
inline at::Tensor Flat(const at::Tensor& values) {
  return values.dim() == 1 ? values : values.reshape({-1});
}

/// Returns rows [begin, begin + size).
inline at::Tensor SliceRows(const at::Tensor& values, int64_t begin, int64_t size) {
  return begin == 0 && size == values.size(0) ? values : values.narrow(0, begin, size);
}

/// Returns the rows themselves if they are contiguous and aligned, otherwise a copy. cuBLAS chooses
/// products by layout, so rows in another layout would get gradients with other bits.
at::Tensor InPlainLayout(const at::Tensor& rows);

class PendingCompaction;

/// The result of a row compaction: the rows that a pass computes, as a subset of all rows.
struct RowSubset {
  /// Not null while the compaction runs. The other members are then not known yet.
  std::shared_ptr<PendingCompaction> pending = nullptr;
  at::Tensor row_indices = {};      ///< int64, ascending; undefined: all rows.
  bool has_every_valid_row = true;  ///< False if a valid row without a gradient is missing.
  int64_t num_out_of_vocab = 0;     ///< Number of rows whose target is outside the given ids.
  int64_t first_out_of_vocab = 0;   ///< Row index of the first such row.
  IdRange targets = {0, 0};         ///< From the smallest to the largest target; may be empty.
  int64_t target_checksum = 0;      ///< Sum of (i + 1) * target[i] over all rows, modulo 2^64.
  /// True if the targets could not be read, because a CUDA graph was being captured. The subset is
  /// then all rows, ignored rows and out-of-vocabulary targets included, and the other members keep
  /// their defaults.
  bool is_unchecked = false;

  /// Returns the number of rows in this subset of `num_all` rows, or an upper bound while the
  /// compaction runs.
  int64_t size(int64_t num_all) const {
    return row_indices.defined() ? row_indices.size(0) : num_all;
  }
  /// Waits for the pending compaction, if there is one, and returns its result. Otherwise returns
  /// the subset itself.
  RowSubset Resolved() const;
};

/// A row compaction that runs on a GPU. Kernels enqueued after it can use its row indices before
/// the host knows how many there are, because buffers have space for all rows and valid rows come
/// first.
class PendingCompaction {
 public:
  virtual ~PendingCompaction() = default;

  /// Returns int64 [all rows] on the GPU: the row indices of the subset, ascending, then zeros.
  virtual at::Tensor row_indices() const = 0;
  /// Returns int64 [all rows] on the GPU: for each row of the subset, the number of valid rows
  /// before it; then zeros. May be called only with Wait::kLater.
  virtual at::Tensor valid_indices() const = 0;
  /// Returns the rows of `values`, [all rows, H], at row_indices(). The result's memory ends on a
  /// whole tile, because the fused kernels are slower if it ends inside a tile.
  virtual at::Tensor Gather(const at::Tensor& values) const = 0;
  /// Returns a pointer to the number of rows in the subset, in GPU memory.
  virtual const int64_t* count() const = 0;
  /// Returns the result. Waits for the compaction, but not for work that was enqueued after it.
  virtual const RowSubset& Result() = 0;
};

/// The time at which the caller of a row compaction waits for its result.
enum class Wait {
  kNow,    ///< Before the call returns.
  kLater,  ///< When it calls RowSubset::Resolved; until then kernels read RowSubset::pending.
};

/// Finds the valid rows of `target`, int64 [all rows], that have a nonzero upstream gradient, or
/// all valid rows if there is no upstream gradient. Counts targets outside `ids` as
/// out-of-vocabulary. Waits for the GPU unless `wait` is kLater and a kernel does the work, or a
/// CUDA graph is being captured (RowSubset::is_unchecked).
RowSubset CompactRows(const Pass& pass, const at::Tensor& target, const UpstreamGradients& upstream,
                      IdRange ids, Wait wait = Wait::kNow);

/// Calls CompactRows for a forward pass. Throws c10::IndexError for an out-of-vocabulary target if
/// this rank is alone and the result is known. Otherwise CheckTargets or CheckTargetOwners throw it
/// later.
RowSubset CompactValidRows(const Pass& pass, const UpstreamGradients& upstream, Wait wait);

/// Returns all targets, int64 [all rows].
at::Tensor FlatTarget(const LinearLogprobInputs& inputs);

/// The rows that a pass computes, one after another, and their position among all rows.
struct Rows {
  at::Tensor hidden;       ///< [n, H]
  at::Tensor all_targets;  ///< [num_all], int64
  at::Tensor temperature;  ///< [n]; undefined: options.temperature.
  at::Tensor row_indices;  ///< [n], int64, into all_targets; undefined: all rows.
  /// All candidates of a forward pass. Their rows count these rows, so those of other rows lie
  /// outside [0, n).
  ListedPairs candidates;
  int64_t num_all = 0;               ///< Number of all rows.
  int64_t num_out_of_vocab = 0;      ///< See RowSubset; 0 while the compaction runs.
  bool are_targets_covered = false;  ///< Every target is known to lie in the shard of a rank.
  bool is_unchecked = false;         ///< See RowSubset.
  /// Not null while the compaction runs. There are then as many rows as targets, and kernels
  /// compute only the first ones.
  std::shared_ptr<PendingCompaction> pending;

  int64_t size() const { return hidden.size(0); }
  at::Tensor target() const;  ///< [n], int64
  /// Waits for the pending compaction, if there is one, and returns the rows that it found.
  /// Otherwise returns these rows.
  Rows Resolved() const;
  /// Returns `values` of these rows as values of all rows. The other rows hold 0.
  at::Tensor ScatterToAll(const at::Tensor& values) const;
  /// Returns the values of these rows from `values` of all rows, [num_all, ...].
  at::Tensor GatherFromAll(const at::Tensor& values) const;
  /// Returns rows [begin, begin + size). While the compaction runs, the range must contain all
  /// rows.
  Rows Slice(int64_t begin, int64_t size) const;
};

/// Returns the rows of `subset`, which may be pending, without their hidden states.
Rows RowsWithoutHidden(const RowSubset& subset, const LinearLogprobInputs& inputs);

/// Returns the rows of `subset`, which may be pending. `hidden` has all rows, [num_all, H].
Rows GatherRows(const RowSubset& subset, const at::Tensor& hidden,
                const LinearLogprobInputs& inputs);

/// The column of each row's target within ids [first, first + count).
struct TargetColumns {
  at::Tensor column;       ///< [n], int64; an arbitrary valid column when the target is elsewhere.
  at::Tensor is_in_range;  ///< [n], bool
};
TargetColumns FindTargets(const Rows& rows, int64_t first, int64_t count);

/// Throws a c10::IndexError that names the first such row if targets of the subset are
/// out-of-vocabulary, unless the options allow them. `target` has all rows.
void CheckTargets(const RowSubset& subset, const at::Tensor& target, const Pass& pass);

/// Performs the check of CheckTargets with the number of ranks that have each row's target, int64
/// [n]. Waits for the GPU, unless a CUDA graph is captured, where nothing is checked.
void CheckTargetOwners(const Rows& rows, const at::Tensor& num_owners, const Pass& pass);

}  // namespace logprobd::torch_ops
