#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace logprobd {

/// A shard's tiles (kernels/common/tile.h), half-open, counted over the whole vocabulary.
struct TileRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

/// Cuts the tiles of `vocab_size` columns into `num_shards` runs whose sizes differ by one at most,
/// the longer ones first: what a shard holds decides how long it takes, and sums are taken by whole
/// tiles. INVALID_ARGUMENT names the largest number of shards where there are fewer tiles than
/// shards.
absl::StatusOr<std::vector<TileRange>> PartitionTiles(int64_t vocab_size, int32_t num_shards);

}  // namespace logprobd
