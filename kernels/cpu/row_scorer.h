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

namespace logprobd::kernels {

/// A head, or a shard of one, laid out for the CPU. Memory stays the caller's.
struct CpuHead {
  const void* packed_weight =
      nullptr;  ///< packed_weight.h; the shard's tiles, aligned to 64 bytes.
  Dtype dtype = Dtype::kBf16;
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;  ///< Of the whole head.
  int64_t tile_begin = 0;  ///< The shard's tiles, half-open.
  int64_t tile_end = 0;
  LogitTransform transform;
  const float* bias = nullptr;  ///< [NumTiles(vocab_size) * kTileColumns], or null.
};

/// Rows to score and where their scores go; a null result is not wanted. Meanings and shapes are
/// those of ScoreBatch. A row whose logits hold NaN or +inf, or -inf alone, gets NaN and ids -1.
struct ScoreRowsParams {
  Dtype hidden_dtype = Dtype::kBf16;
  const void* hidden = nullptr;  ///< [num_rows, hidden_size]
  int64_t num_rows = 0;
  const int32_t* targets = nullptr;             ///< [num_rows]
  const float* temperatures = nullptr;          ///< [num_rows], > 0
  const float* entropy_temperatures = nullptr;  ///< [num_rows], or null: as `temperatures`.
  int32_t top_k = 0;                            ///< At most RowScorer::Options::top_k_max.
  int64_t num_candidates = 0;
  const int32_t* candidate_rows = nullptr;  ///< [num_candidates], ascending.
  const int32_t* candidate_ids = nullptr;   ///< [num_candidates]

  float* logprob = nullptr;
  float* entropy = nullptr;
  float* lse = nullptr;
  int32_t* argmax_id = nullptr;
  float* argmax_logprob = nullptr;
  float* sum_p_squared = nullptr;
  float* max_logit = nullptr;
  float* min_logit = nullptr;
  int32_t* top_k_ids = nullptr;         ///< [num_rows, top_k]; -1 beyond the vocabulary.
  float* top_k_logprobs = nullptr;      ///< [num_rows, top_k]; NaN beyond the vocabulary.
  float* candidate_logprobs = nullptr;  ///< [num_candidates]
  uint8_t* nonfinite = nullptr;         ///< [num_rows], always wanted.
};

/// Scores rows with all of a pool of threads, in a workspace that is allocated once (but
/// for the offsets of candidates, 8 bytes a row, which grow with the first batch that has any).
///
///   rows, as many as the workspace holds -> packed hidden
///   (tile, rows) units over the threads  -> dot products -> logits, in cache -> TileSums
///   rows over the threads                -> TileSums of all tiles -> scores
///
/// What a row gets has the same bits whatever the other rows, the number of threads, the results
/// wanted beside it and the shards that its head is cut into. One batch at a time.
class RowScorer {
 public:
  struct Options {
    CpuIsa isa = CpuIsa::kGeneric;  ///< Must run on this machine.
    int32_t num_threads = 1;        ///< >= 1, the calling thread included.
    /// Rows that are worth a place in the workspace; a larger batch is cut.
    int64_t batch_rows_max = 8192;
    int32_t top_k_max = 128;
    int32_t num_shards = 1;
    /// Tiles of the head's largest shard, which decide the rows of a step; 0: the head's own.
    int64_t num_tiles_max = 0;
  };

  /// Bytes that a scorer of such a head allocates: below 64 MiB for up to 256 threads, hidden sizes
  /// up to 65536 and 2^20 columns.
  static int64_t WorkspaceBytes(const CpuHead& head, const Options& options);

  RowScorer(const CpuHead& head, const Options& options);
  ~RowScorer();
  RowScorer(const RowScorer&) = delete;
  RowScorer& operator=(const RowScorer&) = delete;

  /// Scores a head that is whole.
  void Score(const ScoreRowsParams& params);

  /// Most rows of the steps below; the same for every shard of a head.
  int64_t step_rows() const;

  /// The steps of a shard, for rows [row_begin, row_begin + num_rows) of a batch. Shards take them
  /// together, and after each of the first two join the arrays that it returns. Results are shared
  /// memory: every shard writes the logits of the candidates that it holds, the rest is written by
  /// WriteScores, which one shard alone calls.
  std::span<const Reduction> ScoreTiles(const ScoreRowsParams& params, int64_t row_begin,
                                        int64_t num_rows);
  std::span<const Reduction> SumTiles();
  void WriteScores();

  /// Between SumTiles and WriteScores, where top_k is asked: the shard's best, and where those of
  /// all shards are wanted before WriteScores. [num_rows, top_k] of LogitKey, best first, 0 where
  /// there are fewer; and [num_shards, num_rows, top_k].
  std::span<const uint64_t> TopKeys();
  uint64_t* gathered_top_keys();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd::kernels
