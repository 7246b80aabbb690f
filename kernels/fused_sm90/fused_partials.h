#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/logit_transform.h"
#include "kernels/common/tile.h"
#include "kernels/fused_sm90/fused_choice.h"

namespace logprobd::kernels {

/// How far a tile's exponent may be above its row's level for its exponentials to be relative to
/// that: far enough for any but the most peaked rows, and small enough for a product's sums.
inline constexpr int32_t kReferenceReach = 40;

/// Every logit as 2^(y - e) in 16 bits, kept for a backward pass (kernels/common/tile.h has y and
/// k; kernels/gradient uses them). e is the tile's k, or, with reference_sums, the row's level
/// unless k is more than kReferenceReach above: exponentials of a row that are relative to one
/// exponent can be multiplied as they are. Device memory that stays the caller's.
struct CachedExponentials {
  __nv_bfloat16* values = nullptr;  ///< [num_rows, row_tiles, 192]; 0 beyond the vocabulary.
  int32_t* exponents = nullptr;     ///< [num_rows, row_tiles], e; kEmptyExponent: k is not real.
  int64_t row_tiles = 0;            ///< >= tile_end - tile_begin.
  int64_t exponent_stride = 0;      ///< int32s from row to row; 0: row_tiles.
  /// [num_rows], the sums of any one tile of each row: its exponent is the level, where it is real.
  /// Null: no reference_sums.
  const TileSums* reference_sums = nullptr;
};

/// Inputs and outputs of LaunchFusedPartials. Pointers are device memory and stay the caller's;
/// an output that is null is not asked.
struct FusedPartialsParams {
  /// Of hidden and weight: kBf16 or kF16. Rows of another dtype come as terms: num_splits.
  Dtype dtype = Dtype::kBf16;
  int64_t num_rows = 0;  ///< 0 to 2^24; 0 does nothing.
  /// Or null. In device memory, 0 to num_rows: as many rows are computed, as the kernel finds it;
  /// what the others' outputs hold is not said. Their operands must be readable all the same.
  const int64_t* row_count = nullptr;
  /// Rows of `hidden` that may be read, >= num_rows. Rows of a block that are not there are slower
  /// than rows with any content at all, so a buffer with room for 64 is worth having.
  int64_t readable_rows = 0;
  int64_t hidden_size = 0;  ///< >= 1.
  /// 16-bit terms that a hidden value is the sum of, 1 to kHiddenSplitsMax, as
  /// kernels/common/terms.h lays them out.
  int32_t num_splits = 1;
  const void* hidden = nullptr;  ///< [readable_rows, hidden_stride], 16-byte aligned.
  int64_t hidden_stride = 0;     ///< Elements, >= what a row holds, a multiple of 8.
  /// [columns of the tiles below, weight_stride], 16-byte aligned.
  const void* weight = nullptr;
  int64_t weight_stride = 0;  ///< Elements, >= hidden_size, a multiple of 8.

  int64_t vocab_size = 0;  ///< Of the whole vocabulary, 1 to 2^20.
  /// The shard: this weight's tiles of the whole vocabulary, half-open. Partials are the shard's
  /// alone, tile_begin the first; ids, targets and bias are the whole vocabulary's.
  int64_t tile_begin = 0;
  int64_t tile_end = 0;

  LogitTransform transform;
  const float* bias = nullptr;  ///< [tile_end * 192], of the whole vocabulary, or null.
  /// [num_rows], Log2Scale of the temperature. Logits are as the tensor cores give them: to take
  /// their truncation back (kernels/common/truncation.h) pass the correction to Log2Scale, and to
  /// RowScoresParams::logit_correction; or, where logits are transformed, multiply transform.scale.
  const float* log2_scales = nullptr;
  const float* entropy_log2_scales = nullptr;  ///< [num_rows]; null: no second sums.
  const int32_t* targets = nullptr;            ///< [num_rows], ids in the whole vocabulary.

  PartialLayout layout;              ///< Of both sums.
  TileSums* sums = nullptr;          ///< Always written.
  TileSums* entropy_sums = nullptr;  ///< The same at entropy_log2_scales; null with them.
  bool wants_sum_squares = false;    ///< Else TileSums::sum_squares is 0.

  float* target_logits = nullptr;   ///< [num_rows]; written where these tiles hold the target.
  uint64_t* max_keys = nullptr;     ///< [num_rows], raised to the LogitKey of the largest logit.
  uint32_t* min_keys = nullptr;     ///< [num_rows], raised to ~OrderedBits of the smallest logit.
  float* tile_max = nullptr;        ///< [num_rows, tile_end - tile_begin]: largest logits.
  CachedExponentials exponentials;  ///< Or null. Kept by the instance of 128 rows; no squares then.
};

/// Enqueues the partials of every row and tile on `stream` and returns without waiting: logits are
/// made and used in registers and lie nowhere. A (row, tile) has the same bits whatever num_rows
/// is, whatever else is asked, and the same as LaunchTileStats gives for the same logits.
///
/// Thread-safe. Needs compute capability 9.0 and a build with CUTLASS: see HasFusedKernel. Returns
/// cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchFusedPartials(const FusedPartialsParams& params,
                                              cudaStream_t stream);

/// The same by another instance or in another order than the fastest: same bits. For tests and
/// measurements.
[[nodiscard]] cudaError_t LaunchFusedPartialsAs(const FusedPartialsParams& params,
                                                const FusedChoice& choice, cudaStream_t stream);

/// Whether this build holds the kernel; without it the launches return cudaErrorNotSupported.
[[nodiscard]] bool HasFusedKernel();

}  // namespace logprobd::kernels
