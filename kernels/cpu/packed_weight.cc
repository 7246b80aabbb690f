#include "kernels/cpu/packed_weight.h"

#include <algorithm>
#include <cstring>

namespace logprobd::kernels {
namespace {

/// Four 32-bit words: fp32 elements, or pairs of 16-bit elements.
using Words = uint32_t __attribute__((vector_size(16)));
constexpr int64_t kWords = 4;

Words LoadWords(const void* from) {
  Words words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}

/// Transposes four words of each of four columns: `to` gets [kWords][kGroupColumns] words.
/// `columns` points to the first word of the first column, `stride` bytes before that of the next.
void TransposeWords(const std::byte* columns, int64_t stride, uint32_t* to) {
  const Words a = LoadWords(columns);
  const Words b = LoadWords(columns + stride);
  const Words c = LoadWords(columns + 2 * stride);
  const Words d = LoadWords(columns + 3 * stride);
  const Words ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const Words ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Words cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const Words cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const Words rows[kWords] = {__builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5),
                              __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7),
                              __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
                              __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
  for (int64_t word = 0; word < kWords; ++word) {
    std::memcpy(to + word * kGroupColumns, &rows[word], sizeof(Words));
  }
}

/// Packs the first hidden elements of a whole group of columns, as many as fit whole vectors, and
/// returns how many those are.
template <typename Element, int64_t kPair>
int64_t PackWholeWords(const Element* rows, int64_t row_stride, int64_t hidden_size, Element* to) {
  constexpr int64_t kWordElements = int64_t{4} / static_cast<int64_t>(sizeof(Element));
  constexpr int64_t kStep = kWords * kWordElements;
  const auto stride_bytes = row_stride * static_cast<int64_t>(sizeof(Element));
  int64_t k = 0;
  for (; k + kStep <= hidden_size; k += kStep) {
    uint32_t words[kWords * kGroupColumns];  // [kWords, kGroupColumns]
    for (int64_t column = 0; column < kGroupColumns; column += kWords) {
      const auto* from = reinterpret_cast<const std::byte*>(rows + column * row_stride + k);
      TransposeWords(from, stride_bytes, words + column);
    }
    Element* out = to + k * kGroupColumns;
    if constexpr (kWordElements == kPair) {
      std::memcpy(out, words, sizeof(words));
    } else {
      // The elements of a word belong to different lines.
      for (int64_t word = 0; word < kWords; ++word) {
        for (int64_t column = 0; column < kGroupColumns; ++column) {
          const uint32_t pair = words[word * kGroupColumns + column];
          out[2 * word * kGroupColumns + column] = static_cast<Element>(pair);
          out[(2 * word + 1) * kGroupColumns + column] = static_cast<Element>(pair >> 16);
        }
      }
    }
  }
  return k;
}

/// Packs one tile; kPair hidden elements of a column are adjacent.
template <typename Element, int64_t kPair>
void Pack(const StridedWeight& weight, int64_t num_columns, int64_t hidden_size, void* packed) {
  const auto* rows = static_cast<const Element*>(weight.data);
  auto* tile = static_cast<Element*>(packed);
  const int64_t packed_hidden = (hidden_size + kPair - 1) / kPair * kPair;
  for (int64_t group = 0; group < num_columns; group += kGroupColumns) {
    const int64_t group_columns = std::min(kGroupColumns, num_columns - group);
    const Element* from = rows + group * weight.row_stride;
    Element* to = tile + group * packed_hidden;
    int64_t k = 0;
    if (group_columns == kGroupColumns && weight.element_stride == 1) {
      k = PackWholeWords<Element, kPair>(from, weight.row_stride, hidden_size, to);
    }
    for (; k < hidden_size; ++k) {
      for (int64_t column = 0; column < group_columns; ++column) {
        to[(k / kPair * kGroupColumns + column) * kPair + k % kPair] =
            from[column * weight.row_stride + k * weight.element_stride];
      }
    }
  }
}

}  // namespace

void PackTile(Dtype dtype, const StridedWeight& weight, int64_t num_columns, int64_t hidden_size,
              void* tile) {
  if (num_columns < kTileColumns || (dtype == Dtype::kBf16 && hidden_size % 2 != 0)) {
    std::memset(tile, 0, static_cast<size_t>(PackedTileBytes(dtype, hidden_size)));
  }
  switch (dtype) {
    case Dtype::kBf16:
      return Pack<uint16_t, 2>(weight, num_columns, hidden_size, tile);
    case Dtype::kF16:
      return Pack<uint16_t, 1>(weight, num_columns, hidden_size, tile);
    case Dtype::kF32:
      return Pack<uint32_t, 1>(weight, num_columns, hidden_size, tile);
  }
}

}  // namespace logprobd::kernels
