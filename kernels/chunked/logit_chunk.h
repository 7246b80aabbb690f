#pragma once

#include <cstdint>

#include "kernels/common/logit_transform.h"

namespace logprobd::kernels {

/// Dot products of a block of rows with a run of whole tiles, in device memory, and what makes
/// logits of them.
struct LogitChunk {
  const float* dots = nullptr;  ///< [num_rows, row_stride], 16-byte aligned.
  int64_t row_stride = 0;       ///< Elements, >= num_tiles * 192, a multiple of 4.
  int64_t num_rows = 0;         ///< 0 to 2^24; 0 does nothing.
  int64_t tile_begin = 0;       ///< Of the whole vocabulary.
  int64_t num_tiles = 0;        ///< >= 1. The last tile of the vocabulary may reach beyond it.
  int64_t vocab_size = 0;       ///< Columns at or beyond it take no part.
  LogitTransform transform;
  const float* bias = nullptr;  ///< [tiles of the whole vocabulary * 192], or null.
};

}  // namespace logprobd::kernels
