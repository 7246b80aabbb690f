#pragma once

#include <cstdint>

#include "kernels/chunked/logit_chunk.h"
#include "kernels/common/tile.h"
#include "kernels/common/tile_sums.cuh"

namespace logprobd::kernels {

/// Columns of the chunk that lie in the vocabulary.
inline int64_t ValidColumns(const LogitChunk& chunk) {
  const int64_t begin = chunk.tile_begin * kTileColumns;
  const int64_t columns = chunk.num_tiles * kTileColumns;
  return chunk.vocab_size - begin < columns ? chunk.vocab_size - begin : columns;
}

inline bool IsValid(const LogitChunk& chunk) {
  return chunk.dots != nullptr && chunk.num_rows >= 0 && chunk.num_rows <= (1 << 24) &&
         chunk.tile_begin >= 0 && chunk.num_tiles >= 1 && chunk.row_stride % 4 == 0 &&
         chunk.row_stride >= chunk.num_tiles * kTileColumns && chunk.vocab_size >= 1 &&
         (chunk.tile_begin + chunk.num_tiles - 1) * kTileColumns < chunk.vocab_size;
}

inline bool HasTransform(const LogitChunk& chunk) {
  return chunk.bias != nullptr || !chunk.transform.IsIdentity();
}

/// Logit of a valid column, counted from the chunk's first.
template <bool kTransform>
__device__ __forceinline__ float LogitAt(const LogitChunk& chunk, int64_t row, int64_t column) {
  const float dot = chunk.dots[row * chunk.row_stride + column];
  if constexpr (!kTransform) return dot;
  const float bias =
      chunk.bias == nullptr ? 0.0F : chunk.bias[chunk.tile_begin * kTileColumns + column];
  return LogitOf(dot, bias, chunk.transform);
}

}  // namespace logprobd::kernels
