#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/logit_transform.h"
#include "kernels/common/tile.h"
#include "kernels/cpu/cpu_isa.h"

namespace logprobd::kernels {

/// Bytes of a tile for as many hidden elements as KChunk returns.
inline constexpr int64_t kTileChunkBytes = int64_t{128} * kTileColumns * 4;

/// Returns the number of hidden elements of a chunk. Every kernel sums blocks of hidden elements
/// separately; a chunk consists of whole blocks.
constexpr int64_t KChunk(Dtype weight) {
  return kTileChunkBytes / (kTileColumns * DtypeBytes(weight));
}

/// Inputs and outputs of the dot products of some rows with the columns of one tile. A tile may be
/// multiplied in several calls, one after another, each with further hidden elements; the results
/// are bit-identical to those of one call.
struct TileDotsParams {
  const void* hidden;   ///< Output of DotKernel::pack_rows, from the start of a block.
  int64_t num_rows;     ///< >= 1
  int64_t hidden_size;  ///< Hidden elements of a row.
  /// This call multiplies hidden elements [k_begin, k_end). Both are multiples of KChunk, except
  /// that k_end may be hidden_size.
  int64_t k_begin;
  int64_t k_end;
  const void* weight_tile;  ///< These elements of one tile in the layout of packed_weight.h.
  Dtype weight_dtype;
  /// [num_rows rounded up to the row block, kTileColumns]; written if k_begin is 0, else added to.
  float* dots;
  void* scratch;  ///< kDotScratchBytes of memory, aligned to 64 bytes.
};

inline constexpr int64_t kDotScratchBytes = kTileChunkBytes;

/// An implementation of dot products. For each (row, column) it executes the same operations in the
/// same order, regardless of the other rows and of the row's position in the batch.
struct DotKernel {
  int32_t row_block;  ///< Number of rows that the packed form interleaves.

  /// Returns the number of bytes of a row in the packed form.
  int64_t (*packed_row_bytes)(int64_t hidden_size);

  /// Packs `num_rows` rows of a row-major array; the last block is padded with zeros.
  void (*pack_rows)(Dtype dtype, const void* hidden, int64_t num_rows, int64_t hidden_size,
                    void* packed);

  /// Computes the dot products.
  void (*tile_dots)(const TileDotsParams& params);
};

/// Inputs and outputs of one pass over the dot products of some rows in one tile.
struct CpuTileStatsParams {
  /// [num_rows, kTileColumns], dot products in, logits out; aligned to 64 bytes.
  float* logits = nullptr;
  int64_t num_rows = 0;
  int32_t first_column = 0;  ///< First column of the tile, counted in the vocabulary.
  /// Number of valid columns, 1 to kTileColumns. The logits of the other columns become -inf.
  int32_t num_columns = kTileColumns;
  LogitTransform transform;
  const float* bias = nullptr;                 ///< [kTileColumns], or null.
  const float* log2_scales = nullptr;          ///< [num_rows], c of TileSums.
  const float* entropy_log2_scales = nullptr;  ///< [num_rows], or null.
  bool wants_sum_squares = false;              ///< If true, computes TileSums::sum_squares.
  bool wants_extremes = false;  ///< If true, writes min_logit and argmax of `extremes`.
  /// [num_rows], logits of the targets. If null, rank_counts is not written.
  const float* target_logits = nullptr;
  /// [num_rows], ids in the vocabulary; read with target_logits only.
  const int32_t* targets = nullptr;
  TileSums* sums = nullptr;          ///< [num_rows]
  TileSums* entropy_sums = nullptr;  ///< [num_rows]; not written if entropy_log2_scales is null.
  TileExtremes* extremes = nullptr;  ///< [num_rows]; max_logit is always written.
  /// [num_rows], number of the tile's logits that rank above the target's (RanksAbove).
  int32_t* rank_counts = nullptr;
};

using TileStatsFunction = void (*)(const CpuTileStatsParams& params);

/// Returns the kernel for an instruction set, which this machine must support, and a pair of
/// element types. Pairs other than bf16 x bf16 are converted to fp32, exactly, before they are
/// multiplied.
const DotKernel& DotKernelFor(CpuIsa isa, Dtype hidden, Dtype weight);
/// Returns the tile pass for an instruction set, which this machine must support.
TileStatsFunction TileStatsFor(CpuIsa isa);

namespace internal {

// Each kernels_*.cc file defines the functions of its instruction set.
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
