#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/logit_transform.h"
#include "kernels/common/row_gradient.h"
#include "kernels/common/tile.h"

namespace logprobd::kernels {

/// A tile's exponentials are relative to its row's reference exponent if the tile's own exponent is
/// at most this far above it. Only rows with a very peaked distribution reach the limit. It
/// keeps the sums of products with these exponentials finite.
inline constexpr int32_t kReferenceReach = 40;

/// Cache for the backward pass: every logit as 2^(y - e) in bf16 (kernels/common/tile.h defines y
/// and the tile's exponent k). Without reference_sums e is k. With them e is the row's reference
/// exponent, unless k is more than kReferenceReach above it. If all exponentials of a row are
/// relative to the same exponent, they can be used in a matrix product without a conversion
/// (kernels/row_ops/rebase_exponentials.h). Pointers refer to device memory, which the caller keeps
/// owning.
struct CachedExponentials {
  __nv_bfloat16* values = nullptr;  ///< [num_rows, row_tiles, 192]; 0 beyond the vocabulary.
  /// [num_rows, row_tiles]: e, or kEmptyExponent if k is kEmptyExponent or kNonfiniteExponent.
  int32_t* exponents = nullptr;
  int64_t row_tiles = 0;        ///< >= tile_end - tile_begin.
  int64_t exponent_stride = 0;  ///< int32s from one row to the next; 0: row_tiles.
  /// [num_rows]: sums of any one tile of each row. The exponent of that tile is the row's reference
  /// exponent, unless it is kEmptyExponent or kNonfiniteExponent. If reference_sums is null, rows
  /// have no reference exponent.
  const TileSums* reference_sums = nullptr;
};

/// Inputs and outputs of LaunchFusedPartials. Pointers refer to device memory, which the caller
/// keeps owning; an output that is null is not computed.
struct FusedPartialsParams {
  /// Element type of hidden and weight, kBf16 or kF16. Hidden rows of another dtype are passed as
  /// bf16 splits; see num_splits.
  Dtype dtype = Dtype::kBf16;
  int64_t num_rows = 0;  ///< 0 to 2^24; 0 does nothing.
  /// One number in device memory, 0 to num_rows, or null. The kernel reads it and computes only the
  /// first *row_count rows; the outputs of the other rows are unspecified. All num_rows rows of the
  /// operands must be readable.
  const int64_t* row_count = nullptr;
  /// Rows of `hidden` that may be read, >= num_rows. A block is faster if memory for all of its
  /// rows is readable, whatever its content, so allocate up to 255 rows more than num_rows.
  int64_t readable_rows = 0;
  int64_t hidden_size = 0;  ///< >= 1.
  /// 16-bit values that add up to a hidden value, 1 to kHiddenSplitsMax; kernels/common/dtype.h
  /// has their layout.
  int32_t num_splits = 1;
  const void* hidden = nullptr;  ///< [readable_rows, hidden_stride], 16-byte aligned.
  int64_t hidden_stride = 0;     ///< Elements, at least as many as a row has; a multiple of 8.
  /// [columns of tiles tile_begin to tile_end, weight_stride], 16-byte aligned.
  const void* weight = nullptr;
  int64_t weight_stride = 0;  ///< Elements, >= hidden_size, a multiple of 8.

  int64_t vocab_size = 0;  ///< Columns of the whole vocabulary, 1 to 2^20.
  /// The shard: tiles of the whole vocabulary that this weight holds, half-open. Partials and
  /// maxima cover the shard only, starting with tile_begin; ids, targets and bias refer to the
  /// whole vocabulary.
  int64_t tile_begin = 0;
  int64_t tile_end = 0;  ///< See tile_begin.

  LogitTransform transform;
  const float* bias = nullptr;  ///< [tile_end * 192], of the whole vocabulary, or null.
  /// [num_rows], Log2Scale of the temperature. The kernel does not correct the truncation of the
  /// tensor cores (kernels/common/logit_transform.h). The caller passes the correction to Log2Scale
  /// and to RowScoresParams::logit_correction or, where logits are transformed, multiplies
  /// transform.scale by it.
  const float* log2_scales = nullptr;
  const float* entropy_log2_scales = nullptr;  ///< [num_rows]; null: entropy_sums is not computed.
  const int32_t* targets = nullptr;            ///< [num_rows], ids in the whole vocabulary.

  PartialLayout layout;              ///< Layout of sums and entropy_sums.
  TileSums* sums = nullptr;          ///< Always written.
  TileSums* entropy_sums = nullptr;  ///< Partials at entropy_log2_scales; null without them.
  bool wants_sum_squares = false;    ///< False leaves TileSums::sum_squares at 0.

  float* target_logits = nullptr;  ///< [num_rows]; written for rows whose target is in the shard.
  /// [num_rows]: maximum of the old value and the LogitKey of the largest logit of these tiles.
  uint64_t* max_keys = nullptr;
  /// [num_rows]: maximum of the old value and ~OrderedBits of the smallest logit of these tiles.
  uint32_t* min_keys = nullptr;
  /// [num_rows]: increased by the number of logits of these tiles that rank above the target's
  /// (RanksAbove). Not null: target_logits must hold the logit of every row's target before the
  /// launch, wherever the target's tile is; LaunchListedLogits computes them with the same bits.
  int32_t* rank_counts = nullptr;
  float* tile_max = nullptr;  ///< [num_rows, tile_end - tile_begin]: largest logit of each tile.
  /// Output that is not written if `values` is null. Only kMma128 and the tiles of ChooseCaching
  /// support it, and wants_sum_squares must be false.
  CachedExponentials exponentials;
};

/// Inputs and outputs of LaunchFusedGradient. Pointers point to device memory that the caller owns.
struct FusedGradientParams {
  /// Rows, weight, tiles, transform and bias, as LaunchFusedPartials takes them; the other fields
  /// are not read. The vocabulary is the shard: columns in `rows` are counted from the shard's
  /// first column.
  FusedPartialsParams head;
  const RowGradient* rows = nullptr;  ///< [num_rows]
  /// [tile_end * 192], the weights w in RowGradient's formula, starting at the vocabulary's first
  /// column. Null: gradients have no term with `mean`.
  const float* mean_logit_weights = nullptr;
  /// Output, [num_rows, gradient_stride] of head.dtype, 16-byte aligned: gradients of the dot
  /// products of the tiles. Columns beyond the vocabulary are set to 0.
  void* gradients = nullptr;
  int64_t gradient_stride = 0;  ///< Elements, at least 192 per tile, a multiple of 8.
};

}  // namespace logprobd::kernels
