#include "server/engine/vocab_partition.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/common/tile.h"

namespace logprobd {

absl::StatusOr<std::vector<TileRange>> PartitionTiles(int64_t vocab_size, int32_t num_shards) {
  const int64_t num_tiles = kernels::NumTiles(vocab_size);
  if (num_shards < 1 || num_shards > num_tiles) {
    return absl::InvalidArgumentError(
        absl::StrCat(num_shards, " shards cannot share a vocabulary of ", vocab_size, ": it has ",
                     num_tiles, num_tiles == 1 ? " tile" : " tiles", " of ", kernels::kTileColumns,
                     " columns, so at most ", num_tiles, num_tiles == 1 ? " shard" : " shards"));
  }
  std::vector<TileRange> ranges;
  int64_t begin = 0;
  for (int64_t shard = 0; shard < num_shards; ++shard) {
    const int64_t size = num_tiles / num_shards + (shard < num_tiles % num_shards ? 1 : 0);
    ranges.push_back({begin, begin + size});
    begin += size;
  }
  return ranges;
}

}  // namespace logprobd
