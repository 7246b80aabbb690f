#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/torch_ops/types/linear_logprob.h"

namespace logprobd::torch_ops {

/// Ids [begin, end) of the whole vocabulary.
struct IdRange {
  int64_t begin = std::numeric_limits<int64_t>::min();
  int64_t end = std::numeric_limits<int64_t>::max();

  /// Returns the range from `min` to `max`, both included. INT64_MAX, which is not an id of any
  /// vocabulary, is excluded, because the end cannot exceed it.
  static IdRange From(int64_t min, int64_t max) {
    return {min, max == std::numeric_limits<int64_t>::max() ? max : max + 1};
  }
};

/// This rank's part of the vocabulary.
struct Shard {
  Shard() = default;
  /// `end` is one past the last id that any rank has. Throws c10::ValueError if vocab_valid is
  /// greater than `end`, or if the vocabulary is larger than supported.
  Shard(const at::Tensor& weight, const VocabularyParallel& parallel, int64_t end);

  /// Returns the valid ids of this rank.
  IdRange ids() const { return {begin, begin + columns}; }

  int64_t begin = 0;       ///< Vocabulary id of the first column.
  int64_t columns = 0;     ///< Number of valid rows of the weight; later rows are padding.
  int64_t vocab_size = 0;  ///< Number of valid ids in the whole vocabulary.
};

/// Returns the ids of this rank's weight, including padding.
IdRange ShardIds(const at::Tensor& weight, const VocabularyParallel& parallel);

/// Throws c10::ValueError if two of the ranks' shards have an id in common.
void CheckNoOverlap(std::vector<IdRange> shards);

/// Returns true if `shards` contain every id of the range `targets`. Only the ends of that range
/// are known, so the result may be false although each target lies in a shard.
bool AreCovered(IdRange targets, std::vector<IdRange> shards);

/// A half-open range of columns of this rank's weight that are computed together. Boundaries inside
/// the shard coincide with tile boundaries of the whole vocabulary.
struct Columns {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

/// Maximum number of logits in a block. About five arrays of this size exist at the same time.
inline constexpr int64_t kBlockLogits = int64_t{4} << 20;
/// Maximum number of rows in a block.
inline constexpr int64_t kBlockRows = 32'768;

/// Returns the block of the shard's columns that begins at `begin`. With `block_rows` rows it has
/// at most kBlockLogits logits or, if a single tile has more, one tile.
Columns BlockOfColumns(const Shard& shard, int64_t begin, int64_t block_rows);

/// Returns all blocks of the shard's columns, in order.
std::vector<Columns> BlocksOfColumns(const Shard& shard, int64_t block_rows);

}  // namespace logprobd::torch_ops
