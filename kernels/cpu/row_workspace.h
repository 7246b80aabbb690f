#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "kernels/cpu/row_scorer.h"

// This header defines the memory of a RowScorer: the sizes of its parts and the types that hold
// them.
namespace logprobd::kernels {

inline constexpr size_t kWorkspaceAlignment = 64;

/// An uninitialised array, aligned for the kernels.
template <typename T>
class AlignedArray {
 public:
  explicit AlignedArray(int64_t count)
      : data_(static_cast<T*>(::operator new (static_cast<size_t>(count) * sizeof(T),
                                              std::align_val_t{kWorkspaceAlignment}))) {}
  ~AlignedArray() { ::operator delete (data_, std::align_val_t{kWorkspaceAlignment}); }
  AlignedArray(const AlignedArray&) = delete;
  AlignedArray& operator=(const AlignedArray&) = delete;
  T* get() const { return data_; }

 private:
  T* data_;
};

/// Number of sums of a row that shards add: sum, weighted and sum of squares, then sum and weighted
/// at the entropy's own temperature.
inline constexpr int64_t kSumFields = 5;

/// Sizes of the parts of a workspace.
struct WorkspaceSizes {
  int64_t num_tiles;         ///< Number of tiles of the largest shard.
  int64_t rows;              ///< Number of rows of a step, from packing to combining.
  int64_t unit_rows;         ///< Number of rows of a unit of work.
  int64_t packed_row_bytes;  ///< Largest size of a packed hidden row.
  int64_t bytes;             ///< Total size.
};

WorkspaceSizes WorkspaceSizesOf(const CpuHead& head, const RowScorer::Options& options);

/// Arrays that the shards of a head reduce, for the rows of a step. They are empty for a head with
/// one shard.
struct SharedRows {
  SharedRows(int64_t rows, const RowScorer::Options& options) {
    if (options.num_shards == 1) return;
    const auto count = static_cast<size_t>(rows);
    const size_t lists = count * static_cast<size_t>(options.top_k_max);
    exponents.resize(2 * count);
    sums.resize(static_cast<size_t>(kSumFields) * count);
    max_keys.resize(count);
    min_keys.resize(count);
    top_keys.resize(lists);
    gathered_keys.resize(static_cast<size_t>(options.num_shards) * lists);
  }

  std::vector<int32_t> exponents;       // [2, num_rows]: at the row's temperature, at the entropy's
  std::vector<int64_t> sums;            // [kSumFields, num_rows]
  std::vector<uint64_t> max_keys;       // [num_rows], LogitKey of the largest logit
  std::vector<uint32_t> min_keys;       // [num_rows], ~OrderedBits of the smallest logit
  std::vector<uint64_t> top_keys;       // [num_rows, top_k]
  std::vector<uint64_t> gathered_keys;  // [num_shards, num_rows, top_k]
};

}  // namespace logprobd::kernels
