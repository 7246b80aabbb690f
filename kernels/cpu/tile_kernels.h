#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/logit_transform.h"
#include "kernels/common/tile.h"
#include "kernels/cpu/cpu_isa.h"

namespace logprobd::kernels {

/// Dot products of some rows with the columns of one tile.
struct TileDotsParams {
  const void* hidden;  ///< From DotKernel::pack_rows, the first row at the start of a block.
  int64_t num_rows;    ///< >= 1
  int64_t hidden_size;
  const void* weight_tile;  ///< packed_weight.h
  Dtype weight_dtype;
  float* dots;    ///< [num_rows rounded up to the row block, kTileColumns], written.
  void* scratch;  ///< kDotScratchBytes, aligned to 64.
};

inline constexpr int64_t kDotScratchBytes = int64_t{128} * kTileColumns * 4;

/// A way to compute dot products. Every one of them goes through the same operations in the same
/// order for each (row, column), whatever the other rows and wherever the row stands.
struct DotKernel {
  int32_t row_block;  ///< Rows that the packed form holds together.

  /// Bytes of a row in the packed form.
  int64_t (*packed_row_bytes)(int64_t hidden_size);

  /// Packs `num_rows` rows of a row-major array; the last block is filled up with zeros.
  void (*pack_rows)(Dtype dtype, const void* hidden, int64_t num_rows, int64_t hidden_size,
                    void* packed);

  void (*tile_dots)(const TileDotsParams& params);
};

/// One pass over the logits of some rows in one tile.
struct CpuTileStatsParams {
  float* logits;  ///< [num_rows, kTileColumns]: dot products, which become logits. Aligned to 64.
  int64_t num_rows;
  int32_t first_column;  ///< Of the tile, in the vocabulary.
  int32_t num_columns;   ///< Valid ones, 1 to kTileColumns; the logits of the rest become -inf.
  LogitTransform transform;
  const float* bias;                 ///< [kTileColumns], or null.
  const float* log2_scales;          ///< [num_rows], c of TileSums.
  const float* entropy_log2_scales;  ///< [num_rows], or null.
  bool squares;                      ///< Fill TileSums::sum_squares.
  bool extremes_wanted;              ///< Fill min_logit and argmax of TileExtremes too.
  TileSums* sums;                    ///< [num_rows]
  TileSums* entropy_sums;            ///< [num_rows], at the entropy's scale; unused without scales.
  TileExtremes* extremes;            ///< [num_rows]; max_logit always.
};

using TileStatsFunction = void (*)(const CpuTileStatsParams& params);

/// `isa` must run on this machine. bf16 x bf16 may use instructions for it; every other pair is
/// converted, exactly, to fp32 and multiplied there.
const DotKernel& DotKernelFor(CpuIsa isa, Dtype hidden, Dtype weight);
TileStatsFunction TileStatsFor(CpuIsa isa);

namespace internal {

/// What each file of kernels provides.
const DotKernel& GenericDots();
const DotKernel& Avx2Dots();
const DotKernel& Avx512Dots();
const DotKernel& Avx512Bf16Dots();
const DotKernel& AmxBf16Dots();
void TileStatsGeneric(const CpuTileStatsParams& params);
void TileStatsAvx2(const CpuTileStatsParams& params);
void TileStatsAvx512(const CpuTileStatsParams& params);

}  // namespace internal
}  // namespace logprobd::kernels
