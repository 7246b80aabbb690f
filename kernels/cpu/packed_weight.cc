#include "kernels/cpu/packed_weight.h"

#include <algorithm>
#include <cstring>

namespace logprobd::kernels {
namespace {

/// Packs one tile; kPair hidden elements of a column are adjacent.
template <typename Element, int64_t kPair>
void Pack(const Element* rows, int64_t num_columns, int64_t hidden_size, Element* tile) {
  const int64_t packed_hidden = (hidden_size + kPair - 1) / kPair * kPair;
  for (int64_t group = 0; group < num_columns; group += kGroupColumns) {
    const int64_t group_columns = std::min(kGroupColumns, num_columns - group);
    Element* to = tile + group * packed_hidden;
    for (int64_t k = 0; k < hidden_size; ++k) {
      for (int64_t column = 0; column < group_columns; ++column) {
        to[(k / kPair * kGroupColumns + column) * kPair + k % kPair] =
            rows[(group + column) * hidden_size + k];
      }
    }
  }
}

}  // namespace

void PackTile(Dtype dtype, const void* rows, int64_t num_columns, int64_t hidden_size, void* tile) {
  if (num_columns < kTileColumns || (dtype == Dtype::kBf16 && hidden_size % 2 != 0)) {
    std::memset(tile, 0, static_cast<size_t>(PackedTileBytes(dtype, hidden_size)));
  }
  switch (dtype) {
    case Dtype::kBf16:
      Pack<uint16_t, 2>(static_cast<const uint16_t*>(rows), num_columns, hidden_size,
                        static_cast<uint16_t*>(tile));
      break;
    case Dtype::kF16:
      Pack<uint16_t, 1>(static_cast<const uint16_t*>(rows), num_columns, hidden_size,
                        static_cast<uint16_t*>(tile));
      break;
    case Dtype::kF32:
      Pack<uint32_t, 1>(static_cast<const uint32_t*>(rows), num_columns, hidden_size,
                        static_cast<uint32_t*>(tile));
      break;
  }
}

}  // namespace logprobd::kernels
