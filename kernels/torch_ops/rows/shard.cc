#include "kernels/torch_ops/rows/shard.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "kernels/common/tile.h"

namespace logprobd::torch_ops {
namespace {

using kernels::kTileColumns;

/// Maximum vocabulary size of sums in fixed point (kernels/common/row_sums.h).
constexpr int64_t kVocabSizeMax = int64_t{1} << 20;

void SortByBegin(std::vector<IdRange>& ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const IdRange& a, const IdRange& b) { return a.begin < b.begin; });
}

}  // namespace

Shard::Shard(const at::Tensor& weight, const VocabularyParallel& parallel, int64_t end)
    : begin(parallel.vocab_start), vocab_size(end) {
  TORCH_CHECK_VALUE(vocab_size <= kVocabSizeMax, "the vocabulary has ", vocab_size,
                    " ids: at most ", kVocabSizeMax, " are supported");
  TORCH_CHECK_VALUE(parallel.vocab_valid <= vocab_size, "vocab_valid is ", parallel.vocab_valid,
                    ", but the weight ends at id ", vocab_size);
  if (parallel.vocab_valid > 0) vocab_size = parallel.vocab_valid;
  columns = std::clamp<int64_t>(vocab_size - begin, 0, weight.size(0));
}

IdRange ShardIds(const at::Tensor& weight, const VocabularyParallel& parallel) {
  return {parallel.vocab_start, parallel.vocab_start + weight.size(0)};
}

void CheckNoOverlap(std::vector<IdRange> shards) {
  SortByBegin(shards);
  int64_t end = std::numeric_limits<int64_t>::min();
  for (const IdRange& shard : shards) {
    if (shard.begin >= shard.end) continue;
    TORCH_CHECK_VALUE(shard.begin >= end, "vocab_start: several ranks have id ", shard.begin,
                      "; the ranks' parts of the vocabulary must not overlap");
    end = shard.end;
  }
}

bool AreCovered(IdRange targets, std::vector<IdRange> shards) {
  SortByBegin(shards);
  int64_t covered_end = targets.begin;
  for (const IdRange& shard : shards) {
    if (shard.begin > covered_end) break;  // No shard has the ids of this gap.
    covered_end = std::max(covered_end, shard.end);
  }
  return covered_end >= targets.end;
}

Columns BlockOfColumns(const Shard& shard, int64_t begin, int64_t block_rows) {
  const int64_t tiles =
      std::max<int64_t>(kBlockLogits / (std::max<int64_t>(block_rows, 1) * kTileColumns), 1);
  const int64_t tile = (shard.begin + begin) / kTileColumns;
  return {begin, std::min(shard.columns, (tile + tiles) * kTileColumns - shard.begin)};
}

std::vector<Columns> BlocksOfColumns(const Shard& shard, int64_t block_rows) {
  std::vector<Columns> blocks;
  for (int64_t begin = 0; begin < shard.columns; begin = blocks.back().end) {
    blocks.push_back(BlockOfColumns(shard, begin, block_rows));
  }
  return blocks;
}

}  // namespace logprobd::torch_ops
