#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <memory>

#include "kernels/torch_ops/linear_logprob.h"

namespace logprobd::torch_ops {

/// Ids [begin, end) of the whole vocabulary.
struct IdRange {
  int64_t begin = std::numeric_limits<int64_t>::min();
  int64_t end = std::numeric_limits<int64_t>::max();

  /// The largest number of all has none behind it; no vocabulary has it either.
  static IdRange From(int64_t least, int64_t greatest) {
    return {least, greatest == std::numeric_limits<int64_t>::max() ? greatest : greatest + 1};
  }
};

class RowCompaction;

/// Rows that are to be computed, found by a look at all.
struct RowSelection {
  /// Under way: it will find them, and the rest is not known yet. Or null.
  std::shared_ptr<RowCompaction> search = nullptr;
  at::Tensor index = {};           ///< int64, rising; undefined: all rows.
  bool has_all_counted = true;     ///< No row is left out for want of a gradient.
  int64_t num_out_of_vocab = 0;    ///< Selected ones whose target is outside of the ids.
  int64_t first_out_of_vocab = 0;  ///< The first of them.
  /// From the least to behind the greatest of their targets; empty: there are none.
  IdRange targets = {0, 0};
  /// The sum of (i + 1) target[i] over all rows, modulo 2^64; 0 where nobody looked.
  int64_t target_checksum = 0;
  bool are_unchecked = false;  ///< Nobody looked: all rows.

  /// How many, of `num_all` rows; of a search under way, how many there may be.
  int64_t size(int64_t num_all) const { return index.defined() ? index.size(0) : num_all; }
  /// What the search has found, for which it waits; without one, these.
  RowSelection Resolved() const;
};

/// A search for rows that a GPU does. What is enqueued behind it may use what it finds before the
/// host knows it: until then there are places for all rows, and those that are found come first.
class RowCompaction {
 public:
  virtual ~RowCompaction() = default;

  /// int64 [all rows], on the GPU: the selected rows, rising; behind them 0.
  virtual at::Tensor index() const = 0;
  /// Likewise, of a search under way: how many rows that are not ignored stand before each.
  virtual at::Tensor valid_indices() const = 0;
  /// The rows at index(), of `values` of all rows, [all rows, H]. There is memory behind them for
  /// whole tiles: the fused kernels are slower where it ends within one.
  virtual at::Tensor Gather(const at::Tensor& values) const = 0;
  /// On the GPU: how many rows are selected.
  virtual const int64_t* count() const = 0;
  /// Waits for the search, and not for what was enqueued behind it.
  virtual const RowSelection& Result() = 0;
};

/// When a search that one kernel does ends for its caller.
enum class Search {
  kAwaited,   ///< Before it goes on.
  kUnderWay,  ///< When it asks: until then kernels take the rows from RowSelection::search.
};

/// The rows whose target, [all rows] int64, is not `ignore_index` and that a gradient reaches: with
/// no upstream gradient at all, any row. Waits for a GPU, but with kUnderWay where one kernel
/// searches (fused_row_selection.h), and while its work is captured in a graph: all rows are
/// selected then, and no target is looked at.
RowSelection CompactRows(const at::Tensor& target, int64_t ignore_index,
                         const UpstreamGradients& upstream, IdRange owned,
                         Search search = Search::kAwaited);

}  // namespace logprobd::torch_ops
