#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "kernels/common/dtype.h"
#include "kernels/common/logit_transform.h"
#include "kernels/common/reduction.h"
#include "kernels/cpu/cpu_isa.h"
#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/thread_pool.h"

namespace logprobd::kernels {

/// A head, or a shard of one, on the CPU. The caller owns the memory.
struct CpuHead {
  /// The shard's tiles in the layout of packed_weight.h, aligned to 64 bytes. Null if
  /// strided_weight is given.
  const void* packed_weight = nullptr;
  /// The shard's weight as trainers store it; its data are null if packed_weight is given. It is
  /// packed anew for every unit of work, a chunk at a time; the bits of the scores are the same.
  StridedWeight strided_weight = {};
  Dtype dtype = Dtype::kBf16;  ///< Element type of the weight.
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;  ///< Columns of the whole head.
  int64_t tile_begin = 0;  ///< First tile of the shard.
  int64_t tile_end = 0;    ///< End of the shard's tiles, exclusive.
  LogitTransform transform;
  const float* bias = nullptr;  ///< [NumTiles(vocab_size) * kTileColumns], or null.

  /// Returns whether the weight is packed while it is used.
  bool is_strided() const { return strided_weight.data != nullptr; }
};

/// The logits of some rows in one tile, after scale, bias and cap.
struct TileLogits {
  int64_t row_begin;     ///< First row, counted in the batch.
  int64_t num_rows;      ///< >= 1
  int64_t first_column;  ///< First column, counted in the vocabulary.
  int32_t num_columns;   ///< 1 to kTileColumns
  const float* logits;   ///< [num_rows, kTileColumns], valid during the call.
};

/// Rows to score and the arrays for their scores; a score whose array is null is not computed.
/// Meanings and shapes are those of ScoreBatch (server/base). A row with a NaN or +inf logit, or
/// with -inf only, gets NaN and -1 as ids and rank. The caller owns the memory.
struct ScoreRowsParams {
  Dtype hidden_dtype = Dtype::kBf16;
  const void* hidden = nullptr;  ///< [num_rows, hidden_size]
  int64_t num_rows = 0;
  const int32_t* targets = nullptr;             ///< [num_rows]
  const float* temperatures = nullptr;          ///< [num_rows], > 0
  const float* entropy_temperatures = nullptr;  ///< [num_rows]; if null, `temperatures` is used.
  int32_t top_k = 0;                            ///< 0 to RowScorer::Options::top_k_max.
  int64_t num_candidates = 0;
  const int32_t* candidate_rows = nullptr;  ///< [num_candidates], ascending.
  const int32_t* candidate_ids = nullptr;   ///< [num_candidates]

  // Each of these outputs has the shape [num_rows], unless stated otherwise.
  float* logprob = nullptr;
  float* entropy = nullptr;
  float* lse = nullptr;
  float* lse_rest = nullptr;  ///< Rounding error of lse: exact lse minus lse.
  int32_t* argmax_id = nullptr;
  float* argmax_logprob = nullptr;
  float* sum_p_squared = nullptr;
  float* max_logit = nullptr;
  float* min_logit = nullptr;
  int32_t* target_rank = nullptr;       ///< Number of ids that rank above the target.
  int32_t* top_k_ids = nullptr;         ///< [num_rows, top_k]; -1 beyond the vocabulary.
  float* top_k_logprobs = nullptr;      ///< [num_rows, top_k]; NaN beyond the vocabulary.
  float* candidate_logprobs = nullptr;  ///< [num_candidates]
  uint8_t* nonfinite = nullptr;         ///< [num_rows], must not be null.

  /// If set, called once for all logits, in parts and by several threads at the same time.
  std::function<void(const TileLogits&)> visit_logits;
};

/// Scores rows with several threads, in a workspace that is allocated once. (Only the offsets
/// of candidates, 8 bytes per row, are allocated with the first batch that has candidates.)
///
///   rows, as many as the workspace holds -> packed hidden
///   rows over the threads, for ranks     -> logits of the targets
///   (tile, rows) units over the threads  -> dot products -> logits, in cache -> TileSums
///   rows over the threads                -> TileSums of all tiles -> scores
///
/// The bits of a row's scores do not depend on the other rows, the number of threads, the requested
/// outputs or the shards of the head. Not thread-safe.
class RowScorer {
 public:
  struct Options {
    CpuIsa isa = CpuIsa::kGeneric;  ///< This machine must support it.
    int32_t num_threads = 1;        ///< >= 1, including the calling thread.
    /// Maximum number of rows for which the workspace is sized; a larger batch is scored in several
    /// steps.
    int64_t batch_rows_max = 8192;
    int32_t top_k_max = 128;
    int32_t num_shards = 1;
    /// Number of tiles of the head's largest shard, which determines step_rows(). If 0, the number
    /// of tiles of `head` is used.
    int64_t num_tiles_max = 0;
  };

  /// Returns the number of bytes that a scorer of such a head allocates: less than 64 MiB for up to
  /// 256 threads, hidden sizes up to 65536 and 2^20 columns.
  static int64_t WorkspaceBytes(const CpuHead& head, const Options& options);

  /// Starts its own threads. Throws std::bad_alloc, and std::system_error as ThreadPool does.
  RowScorer(const CpuHead& head, const Options& options);
  /// Uses the caller's threads, which must outlive the scorer. There are options.num_threads of
  /// them. Throws std::bad_alloc.
  RowScorer(const CpuHead& head, const Options& options, LoopThreads& threads);
  ~RowScorer();
  RowScorer(const RowScorer&) = delete;
  RowScorer& operator=(const RowScorer&) = delete;

  /// Scores a batch against a head with one shard.
  void Score(const ScoreRowsParams& params);

  /// Returns the maximum number of rows of a step, which is the same for every shard of a head.
  int64_t step_rows() const;

  /// Run the steps of a shard for rows [row_begin, row_begin + num_rows) of a batch, in the order
  /// ScoreTargets (only if target_rank is requested), ScoreTiles, SumTiles, WriteScores. All shards
  /// run all but the last; after each of these, the caller reduces the returned arrays over the
  /// shards. All shards share the score arrays: every shard writes the logits of its candidates
  /// there, and WriteScores, which one shard runs, writes the scores.
  std::span<const Reduction> ScoreTargets(const ScoreRowsParams& params, int64_t row_begin,
                                          int64_t num_rows);
  std::span<const Reduction> ScoreTiles(const ScoreRowsParams& params, int64_t row_begin,
                                        int64_t num_rows);
  std::span<const Reduction> SumTiles();
  void WriteScores();

  /// Returns the shard's top-k lists: LogitKeys [num_rows, top_k], best first, 0 in empty slots.
  /// Must be called between SumTiles and WriteScores if top_k > 0.
  std::span<const uint64_t> TopKeys();
  /// Returns the array [num_shards, num_rows, top_k] to which the caller copies the lists of all
  /// shards before WriteScores.
  uint64_t* gathered_top_keys();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd::kernels
