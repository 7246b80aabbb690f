#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/arena.h"
#include "kernels/common/dtype.h"
#include "kernels/common/row_sums.h"
#include "server/base/scoring_engine.h"
#include "server/engine/kernel_params.h"

namespace logprobd {

/// The head with which a GPU scores, and the limits that determine the sizes of its buffers.
struct WorkspacePlanOptions {
  int64_t vocab_size = 0;   ///< Valid columns of the whole head, 1 to 2^20.
  int64_t hidden_size = 0;  ///< >= 1.
  kernels::Dtype head_dtype = kernels::Dtype::kBf16;
  /// Number of shards of the head. Their ranges of tiles differ in size by at most one tile; the
  /// larger ranges come first.
  int32_t num_shards = 1;
  int64_t tile_begin = 0;  ///< First tile of this shard.
  int64_t tile_end = 0;    ///< End of this shard's tiles; 0 means the end of the head.
  int64_t batch_rows_max = kDefaultBatchRowsMax;  ///< >= 1.
  int32_t top_k_max = 128;
  /// Maximum number of candidates that one pass over a batch scores; a batch with more candidates
  /// takes several passes.
  int64_t candidates_per_pass = int64_t{1} << 20;
  /// Upper bound on all device memory except the weight.
  int64_t workspace_bytes_max = int64_t{512} << 20;
  /// Maximum number of rows of a block, a multiple of kRowGranularity. The plan has fewer if the
  /// memory bounds require it.
  int64_t block_rows_max = 2'048;
  /// Maximum number of bytes of a chunk of logits. The defaults of this limit and of block_rows_max
  /// were chosen by measurements on an H200; see kernels/chunked/README.md.
  int64_t logits_bytes = int64_t{136} << 20;
  /// True if the fused kernel scores all rows that it supports; the chunked path then shares its
  /// workspace.
  bool with_fused = false;
  /// Upper bound on partials, chunks and row states together when `with_fused` is true.
  int64_t fused_workspace_bytes = int64_t{64} << 20;
  /// Number of multiprocessors of the GPU. Chunks are sized so that the GEMM's last wave of thread
  /// blocks leaves few of them idle.
  int32_t num_sms = 132;
};

/// GEMMs run on a multiple of this number of rows, so that small batches share a few shapes.
inline constexpr int64_t kRowGranularity = 64;

/// Bytes of one slice of an exchange between shards. See PeerExchangeParams::slice_bytes.
inline constexpr int64_t kExchangeSliceBytes = int64_t{1} << 20;

/// Maximum number of sums per row that shards add up. See kernels/combine/shard_sums.h.
inline constexpr int64_t kSharedSumFields = 5;

/// Bytes of device memory that a GEMM may use in addition to its operands, for the counter from
/// which the thread blocks of a persistent kernel take their tiles. The partial sums of a GEMM
/// that splits K would need a thousand times as much.
inline constexpr int64_t kGemmCounterBytes = 256;

/// Bytes per row of the scores that a GPU returns: all columns with one score per row, and four
/// bytes for the flag of a nonfinite row.
inline constexpr int64_t kRowScoreBytes = [] {
  int64_t bytes = 4;
  ForEachRowColumn([&bytes](const auto& column) { bytes += column.kElementBytes; });
  return bytes;
}();
static_assert(
    [] {
      bool all_have_four = true;
      ForEachRowColumn(
          [&](const auto& column) { all_have_four = all_have_four && column.kElementBytes == 4; });
      return all_have_four;
    }(),
    "slots lay out columns without padding");

/// How hidden rows and a weight of given dtypes are multiplied.
enum class ProductForm {
  kNative,  ///< Both are multiplied as stored.
  /// Hidden rows are converted to a bf16 split (kernels/common/dtype.h), and there is one copy of
  /// the weight per split.
  kBf16Split,
  kWidened,  ///< Both are converted to fp32, which is exact.
};

/// How the arena holds the product of some rows with the weight rows of their targets, which the
/// chunked path computes before the first chunk. The weight rows come first; offsets are in bytes.
struct TargetProduct {
  int64_t converted_offset = 0;  ///< Weight rows in the form in which they are multiplied.
  int64_t dots_offset = 0;       ///< fp32 products, [rows, rows].
  int64_t bytes = 0;             ///< End of the product.
};

/// The size of every buffer of the CUDA engine. The head and the limits determine all sizes; no
/// request changes them.
///
/// A batch is split into blocks of rows; the hidden rows of a block are in one of two buffers. The
/// chunked path scores a block in chunks of tiles: a GEMM writes logits, one pass over them
/// computes the partials, and then the next chunk overwrites the logits. The combine follows the
/// last chunk. The fused path uses the memory of the chunks and partials (the arena) for its own
/// partials, and afterwards for the search for the top-k lists. Its blocks are larger. Sizes are in
/// bytes unless stated otherwise.
struct WorkspacePlan {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  kernels::Dtype head_dtype = kernels::Dtype::kBf16;
  int64_t batch_rows_max = 0;
  int32_t top_k_max = 0;
  int64_t candidates_per_pass = 0;
  int32_t num_sms = 0;

  int32_t num_shards = 1;
  int64_t tile_begin = 0;
  int64_t num_tiles = 0;  ///< Tiles of this shard, from tile_begin on.
  /// Number of tiles of the largest shard. It determines the sizes, so that all shards of a head
  /// split a batch into the same blocks.
  int64_t num_tiles_max = 0;
  /// Elements from one row of weight or hidden to the next: a multiple of 16 bytes in every dtype.
  /// The elements beyond hidden_size are zero. This is also the K of the GEMM.
  int64_t padded_hidden = 0;
  /// Maximum number of rows of a chunked block, a multiple of kRowGranularity.
  int64_t block_rows = 0;

  int64_t hidden_bytes = 0;            ///< One of two buffers of hidden rows.
  int64_t logits_bytes = 0;            ///< One chunk of fp32 logits.
  int64_t converted_weight_bytes = 0;  ///< One converted chunk of the weight; 0 for fp32 heads.
  int64_t partial_bytes = 0;           ///< Tile partials of a block at both temperatures.
  int64_t arena_bytes = 0;             ///< Partials, logits and converted weight together.
  bool with_fused = false;
  int64_t row_state_rows = 0;   ///< Maximum number of rows of a block on either path.
  int64_t row_state_bytes = 0;  ///< The arrays of RowState.
  int64_t slot_bytes = 0;       ///< Inputs and scores of one of the two batches in flight.
  int64_t gemm_bytes = 0;       ///< Counters of the GEMM kernels.
  int64_t exchange_bytes = 0;   ///< Mailbox that other shards write to; 0 for one shard.
  int64_t workspace_bytes = 0;  ///< All of the above, with two hidden buffers and two slots.

  /// Returns the bytes of the weight on the device. It has num_tiles * 192 rows; the rows beyond
  /// the vocabulary are zero.
  int64_t weight_bytes() const;

  ProductForm ProductFormOf(kernels::Dtype hidden_dtype) const;

  /// Returns true if 16-bit tensor cores compute the dot products, false if fp32 arithmetic does.
  bool UsesTensorCores(kernels::Dtype hidden_dtype) const {
    return head_dtype != kernels::Dtype::kF32 &&
           ProductFormOf(hidden_dtype) != ProductForm::kWidened;
  }

  /// Returns true if the weight is multiplied in a form other than the stored one.
  bool ConvertsWeight(kernels::Dtype hidden_dtype) const {
    return ProductFormOf(hidden_dtype) != ProductForm::kNative &&
           head_dtype != kernels::Dtype::kF32;
  }

  /// Returns the bytes of a hidden row in the form in which it is multiplied.
  int64_t MultipliedRowBytes(kernels::Dtype hidden_dtype) const;
  /// Returns the bytes of a hidden row before its conversion, or 0 if no conversion is needed.
  int64_t SourceRowBytes(kernels::Dtype hidden_dtype) const;

  /// Returns the number of rows of this dtype that a hidden buffer holds, a multiple of
  /// kRowGranularity.
  int64_t HiddenRows(kernels::Dtype hidden_dtype) const;

  /// Returns the byte offset of the rows of a block in their hidden buffer. Rows that need a
  /// conversion follow the space for the converted rows.
  int64_t HiddenOffset(kernels::Dtype hidden_dtype) const;

  /// Returns the maximum number of rows of a chunked block of this dtype, a multiple of
  /// kRowGranularity and at most block_rows.
  int64_t BlockRows(kernels::Dtype hidden_dtype) const;

  /// Returns the layout of the product of `rows` rows, a multiple of kRowGranularity, with their
  /// targets. The arena has room for kRowGranularity rows at least.
  TargetProduct TargetProductOf(kernels::Dtype hidden_dtype, int64_t rows) const;

  /// Returns the maximum number of rows of a fused block of this dtype, a multiple of
  /// kRowGranularity. `num_sums` is 2 if the entropy has its own temperature, otherwise 1; `top_k`
  /// is 0 if no list is requested.
  int64_t FusedRows(kernels::Dtype hidden_dtype, int num_sums, int32_t top_k) const;

  /// Returns the bytes of the top-k keys of all shards, which are gathered in the arena before they
  /// are merged.
  int64_t GatheredKeyBytes(int64_t rows, int32_t top_k) const;

  /// Returns the bytes of one shard's top-k keys for `rows` rows, rounded up so that the array
  /// after them is aligned.
  static int64_t TopKKeyBytes(int64_t rows, int32_t top_k);

  /// Returns the number of tiles of a chunk for a block of `rows` rows, 1 to BlockRows; the last
  /// chunk may have fewer tiles. Among the counts that fit, it chooses the one with the lowest cost
  /// in waves of thread blocks and launches.
  int64_t ChunkTiles(kernels::Dtype hidden_dtype, int64_t rows) const;
};

/// Arrays in device memory with the state of a block's rows on either path.
struct RowState {
  kernels::RowNormalizer* normalizers = nullptr;  ///< [row_state_rows]
  uint64_t* max_keys = nullptr;                   ///< [row_state_rows]
  uint64_t* chunked_top_k_keys = nullptr;         ///< [block_rows, top_k_max], chunked path only.
  float* target_logits = nullptr;                 ///< [row_state_rows]
  uint32_t* min_keys = nullptr;                   ///< [row_state_rows]
  int32_t* rank_counts = nullptr;                 ///< [row_state_rows]
  /// Arrays that are reduced over the shards, [kSharedSumFields, row_state_rows] and
  /// [2, row_state_rows]; null for one shard.
  int64_t* row_sums = nullptr;
  int32_t* exponents = nullptr;
};

/// Places the arrays in `arena`. Reads only counts of rows and shards, and top_k_max.
RowState PlaceRowState(const WorkspacePlan& plan, kernels::Arena& arena);

/// Returns `rows` rounded up to a multiple of kRowGranularity.
constexpr int64_t PadRows(int64_t rows) {
  return (rows + kRowGranularity - 1) / kRowGranularity * kRowGranularity;
}

/// Returns the number of rows of the blocks into which `rows` rows, at least 1, are split when a
/// block holds at most `block_rows_max`: as few blocks as possible, of about the same size as far
/// as multiples of kRowGranularity allow, because a small last block would read the whole weight
/// for few rows. Blocks are multiples of 256, which fills the clusters of the fused kernel, unless
/// they are too large then, or the last block has neither half as many rows as the others nor 512,
/// whose products take longer than reading the weight.
constexpr int64_t EvenBlockRows(int64_t rows, int64_t block_rows_max) {
  const int64_t num_blocks = (rows + block_rows_max - 1) / block_rows_max;
  const int64_t even = (rows + num_blocks - 1) / num_blocks;
  constexpr int64_t kClusterRows = 256;
  const int64_t filled = (even + kClusterRows - 1) / kClusterRows * kClusterRows;
  constexpr int64_t kLargeRows = 512;
  const int64_t last = rows - (num_blocks - 1) * filled;
  const bool is_last_large = num_blocks == 1 || last >= std::min(filled / 2, kLargeRows);
  return filled <= block_rows_max && is_last_large ? filled : PadRows(even);
}

/// Chooses the sizes. If the bounds do not allow the largest sizes, blocks get fewer rows, and then
/// chunks get fewer tiles. The smallest plan (64 rows, one tile) is returned even if it exceeds
/// workspace_bytes_max.
WorkspacePlan PlanWorkspace(const WorkspacePlanOptions& options);

}  // namespace logprobd
