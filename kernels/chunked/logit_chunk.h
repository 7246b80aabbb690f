#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/logit_key.h"
#include "kernels/common/logit_transform.h"
#include "kernels/common/tile.h"

// A chunk of fp32 dot products, as cuBLASLt writes it, and the kernels that read it: partial sums
// per tile, the running top-k of each row, and single logits. Every launch below enqueues on
// `stream`, returns without waiting and is thread-safe. It returns cudaErrorInvalidValue when a
// parameter is out of range, otherwise the error of the launch. Pointers in the *Params point to
// device memory, which the caller owns.
namespace logprobd::kernels {

/// The dot products of a block of rows with the columns of consecutive whole tiles, in device
/// memory, and the transform that turns them into logits.
struct LogitChunk {
  const float* dots = nullptr;  ///< [num_rows, row_stride], 16-byte aligned.
  int64_t row_stride = 0;       ///< Elements, >= num_tiles * 192, a multiple of 4.
  int64_t num_rows = 0;         ///< 0 to 2^24; 0 does nothing.
  int64_t tile_begin = 0;       ///< First tile, counted in the whole vocabulary.
  int64_t num_tiles = 0;        ///< >= 1. The last tile may extend beyond the vocabulary.
  int64_t vocab_size = 0;       ///< Columns at or beyond it are ignored.
  LogitTransform transform;
  const float* bias = nullptr;  ///< [tiles of the whole vocabulary * 192], or null.
};

/// Inputs and outputs of LaunchTileStats.
struct TileStatsParams {
  LogitChunk chunk;
  const float* log2_scales = nullptr;          ///< [num_rows], Log2Scale of the temperature.
  const float* entropy_log2_scales = nullptr;  ///< [num_rows]; null: entropy_sums is not computed.
  const int32_t* targets = nullptr;            ///< [num_rows], ids in the whole vocabulary.

  /// First tile of the chunk's shard: sums and entropy_sums start with it.
  int64_t tile_origin = 0;
  PartialLayout layout;              ///< Layout of sums and entropy_sums.
  TileSums* sums = nullptr;          ///< The partials of the chunk's tiles are written.
  TileSums* entropy_sums = nullptr;  ///< Partials at entropy_log2_scales; null without them.
  bool wants_sum_squares = false;    ///< False leaves TileSums::sum_squares at 0.

  float* target_logits = nullptr;  ///< [num_rows]; written where the chunk holds the target.
  /// [num_rows]: maximum of the old value and the LogitKey of the chunk's largest logit; null: not
  /// requested.
  uint64_t* max_keys = nullptr;
  /// [num_rows]: maximum of the old value and ~OrderedBits of the chunk's smallest logit; null: not
  /// requested.
  uint32_t* min_keys = nullptr;
  /// [num_rows]: increased by the number of the chunk's logits that rank above the target's
  /// (RanksAbove); null: not requested. Otherwise target_logits must hold the logit of every row's
  /// target before the launch; LaunchTargetLogits computes them.
  int32_t* rank_counts = nullptr;
};

/// Computes the partials of every tile of a chunk. The bits of the partials of a (row, tile) depend
/// only on its logits and scales, not on which outputs are requested.
[[nodiscard]] cudaError_t LaunchTileStats(const TileStatsParams& params, cudaStream_t stream);

/// Returns cudaErrorNoKernelImageForDevice when this build has no code for the current device.
[[nodiscard]] cudaError_t ProbeTileStats();

/// Inputs and outputs of LaunchTopK.
struct TopKParams {
  LogitChunk chunk;
  int32_t top_k = 0;         ///< 1 to kTopKMax.
  uint64_t* keys = nullptr;  ///< [num_rows, top_k], LogitKeys, best first; 0 marks an empty slot.
};

/// Merges a chunk into the running top-k of every row. `keys` must be all zero before the first
/// chunk. The result does not depend on the order or the boundaries of the chunks.
[[nodiscard]] cudaError_t LaunchTopK(const TopKParams& params, cudaStream_t stream);

/// Inputs and outputs of LaunchGatherLogits.
struct GatherLogitsParams {
  LogitChunk chunk;
  const int32_t* rows = nullptr;  ///< [count], rows of the batch.
  const int32_t* ids = nullptr;   ///< [count], ids in the whole vocabulary.
  int32_t row_begin = 0;          ///< Row of the batch that is row 0 of the chunk.
  int64_t count = 0;              ///< 0 does nothing.
  float* logits = nullptr;        ///< [count]; written where the chunk holds the row and the id.
};

/// Looks up the logits of listed (row, id) pairs in a chunk.
[[nodiscard]] cudaError_t LaunchGatherLogits(const GatherLogitsParams& params, cudaStream_t stream);

/// The targets of some rows and the shard that may hold them, in device memory.
struct ShardTargets {
  const int32_t* targets = nullptr;  ///< [num_rows], ids in the whole vocabulary.
  int64_t num_rows = 0;              ///< 0 to 2^24; 0 does nothing.
  int64_t column_begin = 0;          ///< First column of the shard.
  int64_t column_end = 0;            ///< End of the shard's columns, exclusive.
};

/// Copies the weight row of each target to the rows of `out`, [num_rows, row_bytes]. A target that
/// the shard does not hold gets a copy of its first row. `weight` starts with column_begin; both
/// arrays are 16-byte aligned, and row_bytes is a multiple of 16.
[[nodiscard]] cudaError_t LaunchGatherWeight(const ShardTargets& targets, const void* weight,
                                             int64_t row_bytes, void* out, cudaStream_t stream);

/// Inputs and outputs of LaunchTargetLogits.
struct TargetLogitsParams {
  ShardTargets targets;
  /// [num_rows, row_stride], the products of the rows with the weight rows that LaunchGatherWeight
  /// has copied: the product of a row with its target is on the diagonal.
  const float* dots = nullptr;
  int64_t row_stride = 0;  ///< Elements, >= num_rows.
  LogitTransform transform;
  const float* bias = nullptr;  ///< As in LogitChunk.
  float* logits = nullptr;      ///< [num_rows]; written where the shard holds the target.
};

/// Computes the logits of the targets, which ranks are counted against.
[[nodiscard]] cudaError_t LaunchTargetLogits(const TargetLogitsParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
