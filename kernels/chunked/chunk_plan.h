#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"

namespace logprobd::kernels {

/// What the chunked path is to serve, and the sizes it may choose from.
struct ChunkPlanOptions {
  int64_t vocab_size = 0;   ///< Valid columns of the whole head, 1 to 2^20.
  int64_t hidden_size = 0;  ///< >= 1.
  Dtype head_dtype = Dtype::kBf16;
  /// Which of the equal runs of tiles that a head is cut into this is; runs differ by one tile at
  /// most, the longer ones first.
  int32_t num_shards = 1;
  int64_t tile_begin = 0;
  int64_t tile_end = 0;            ///< 0: the head's last.
  int64_t batch_rows_max = 8'192;  ///< >= 1.
  int32_t top_k_max = 128;
  /// Candidates that are looked up in one pass over a block; more take further passes.
  int64_t candidates_per_pass = int64_t{1} << 20;
  /// Bound on all device memory beside the weight.
  int64_t workspace_bytes_max = int64_t{512} << 20;
  /// Most rows of a block, a multiple of kRowGranularity. Fewer where memory asks for it.
  int64_t block_rows_max = 2'048;
  /// Most bytes of a chunk of logits. This and block_rows_max were measured on one H200: README.md.
  int64_t logits_bytes = int64_t{136} << 20;
  /// Whether the fused kernel scores what it can; the chunked path then keeps to its workspace.
  bool with_fused = false;
  /// With it: bound on partials, chunks and row states together.
  int64_t fused_workspace_bytes = int64_t{64} << 20;
  /// Multiprocessors: a chunk is sized so that the GEMM's last wave fills them.
  int32_t num_sms = 132;
};

/// GEMMs are run on a multiple of this many rows, so that the shape of a small batch is one of few.
inline constexpr int64_t kRowGranularity = 64;

/// Batches that own buffers at a time: one computes while the next is copied.
inline constexpr int64_t kChunkSlots = 2;

/// What a shard tells another at a time: PeerExchangeParams::slice_bytes.
inline constexpr int64_t kExchangeSliceBytes = int64_t{1} << 20;

/// Sums of a row that shards add up, at most: see shard_sums.h.
inline constexpr int64_t kSharedSumFields = 5;

/// Device memory that a GEMM may use beside its operands: the counter from which a persistent
/// kernel's blocks take their tiles. Shared sums would need a thousand times more.
inline constexpr int64_t kGemmCounterBytes = 256;

/// The sizes of every buffer of the CUDA paths, fixed by the head and the limits alone: nothing a
/// request says changes them.
///
/// A batch is cut into blocks of rows; a block's hidden rows lie in one of two buffers. A block is
/// scored in chunks of tiles: GEMM into the logits buffer, one pass into the partials, then the
/// next chunk; the combine follows the last. The fused kernel uses what chunks and partials lie in
/// for its partials, and for the search of lists after them, and takes larger blocks. Sizes are in
/// bytes unless they say otherwise.
struct ChunkPlan {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  Dtype head_dtype = Dtype::kBf16;
  int64_t batch_rows_max = 0;
  int32_t top_k_max = 0;
  int64_t candidates_per_pass = 0;
  int32_t num_sms = 0;

  int32_t num_shards = 1;
  int64_t tile_begin = 0;
  int64_t num_tiles = 0;  ///< From tile_begin on.
  /// Of the largest shard: what decides sizes is the same for all shards of a head, which score
  /// the same blocks of rows together.
  int64_t num_tiles_max = 0;
  /// Elements from one row of weight or hidden to the next, zero beyond hidden_size: a multiple of
  /// 16 bytes in every dtype, and the GEMM's K.
  int64_t padded_hidden = 0;
  int64_t block_rows = 0;  ///< Most rows of a block, a multiple of kRowGranularity.

  int64_t hidden_bytes = 0;            ///< One of kChunkSlots buffers of hidden rows.
  int64_t logits_bytes = 0;            ///< One chunk of fp32 logits.
  int64_t converted_weight_bytes = 0;  ///< A chunk of the weight, converted; 0 for fp32 heads.
  int64_t partial_bytes = 0;           ///< Tile partials of a block, for both temperatures.
  int64_t arena_bytes = 0;             ///< What the last three lie in, one after another.
  bool with_fused = false;
  int64_t row_state_rows = 0;  ///< Most rows of a block on either path.
  /// Normalisers, logits of note, running top-k of a block, and what shards join.
  int64_t row_state_bytes = 0;
  int64_t slot_bytes = 0;       ///< One of kChunkSlots: row inputs and scores of a batch.
  int64_t gemm_bytes = 0;       ///< Counters of the GEMM's kernels.
  int64_t exchange_bytes = 0;   ///< Where other shards write what is joined; 0 for one shard.
  int64_t workspace_bytes = 0;  ///< All of the above.

  /// Bytes of the weight on the device: num_tiles * 192 rows, the last ones zero.
  int64_t weight_bytes() const;

  /// How a pair of dtypes is multiplied.
  enum class Pair {
    kNative,     ///< As stored.
    kNumSplits,  ///< Hidden rows as bf16 terms, the weight once for each (kernels/common/terms.h).
    kWidened,    ///< Both sides as fp32, exactly.
  };
  Pair PairOf(Dtype hidden_dtype) const;

  /// Whether 16-bit tensor cores make the dot products; else fp32 arithmetic does.
  bool UsesTensorCores(Dtype hidden_dtype) const {
    return head_dtype != Dtype::kF32 && PairOf(hidden_dtype) != Pair::kWidened;
  }

  /// Whether the weight is multiplied in another form than it is stored in.
  bool ConvertsWeight(Dtype hidden_dtype) const {
    return PairOf(hidden_dtype) != Pair::kNative && head_dtype != Dtype::kF32;
  }

  /// Bytes of a row as it is multiplied, and of what it is made from beside it (0 where the same).
  int64_t MultipliedRowBytes(Dtype hidden_dtype) const;
  int64_t SourceRowBytes(Dtype hidden_dtype) const;

  /// Rows of this dtype that a hidden buffer holds, a multiple of kRowGranularity.
  int64_t HiddenRows(Dtype hidden_dtype) const;

  /// Most rows of a chunked block of this dtype, a multiple of kRowGranularity, at most block_rows.
  int64_t BlockRows(Dtype hidden_dtype) const;

  /// Most rows of a block for the fused kernel, likewise; `num_sums` is 2 where the entropy has a
  /// temperature of its own, else 1; `top_k` is 0 where no list is asked.
  int64_t FusedRows(Dtype hidden_dtype, int num_sums, int32_t top_k) const;

  /// Bytes of the lists of all shards, which lie together in the arena before they are merged.
  int64_t GatheredKeyBytes(int64_t rows, int32_t top_k) const;

  /// Bytes of such a list's keys for `rows` rows. They lie first in the arena, so what follows is
  /// aligned.
  static int64_t FusedKeyBytes(int64_t rows, int32_t top_k);

  /// Tiles of a chunk for a block of `rows` rows (any count from 1 to BlockRows); the last chunk
  /// may have fewer. Of the counts that fit, the one with the fewest waves in all.
  int64_t ChunkTiles(Dtype hidden_dtype, int64_t rows) const;
};

/// `rows` rounded up to kRowGranularity.
constexpr int64_t PadRows(int64_t rows) {
  return (rows + kRowGranularity - 1) / kRowGranularity * kRowGranularity;
}

/// Fixes the sizes. Where the bound is short, blocks get fewer rows, then chunks fewer tiles; the
/// smallest plan (64 rows, one tile) is returned even if it does not fit: see workspace_bytes.
ChunkPlan PlanChunks(const ChunkPlanOptions& options);

}  // namespace logprobd::kernels
