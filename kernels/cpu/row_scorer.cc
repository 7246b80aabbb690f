#include "kernels/cpu/row_scorer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/common/logit_key.h"
#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"
#include "kernels/cpu/combine_tiles.h"
#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/row_workspace.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/tile_kernels.h"

namespace logprobd::kernels {
namespace {

/// Combines the extremes of a tile into those of a row.
void Join(TileExtremes& row, const TileExtremes& tile) {
  if (tile.max_logit > row.max_logit ||
      (tile.max_logit == row.max_logit && tile.argmax < row.argmax)) {
    row.max_logit = tile.max_logit;
    row.argmax = tile.argmax;
  }
  row.min_logit = std::min(row.min_logit, tile.min_logit);
}

constexpr bool WantsExtremes(const ScoreRowsParams& params) {
  return params.argmax_id != nullptr || params.argmax_logprob != nullptr ||
         params.max_logit != nullptr || params.min_logit != nullptr;
}

/// Returns true if the entropy is requested and has its own temperatures.
constexpr bool HasOwnEntropy(const ScoreRowsParams& params) {
  return params.entropy_temperatures != nullptr && params.entropy != nullptr;
}

constexpr TileExtremes kNoExtremes = {-std::numeric_limits<float>::infinity(),
                                      std::numeric_limits<float>::infinity(),
                                      std::numeric_limits<int32_t>::max()};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace

struct RowScorer::Impl {
  Impl(const CpuHead& head_given, const Options& options_given, LoopThreads* threads)
      : head(head_given),
        options(options_given),
        sizes(WorkspaceSizesOf(head, options)),
        num_tiles(head.tile_end - head.tile_begin),
        own_pool(threads == nullptr ? std::make_unique<ThreadPool>(options.num_threads) : nullptr),
        pool(threads == nullptr ? *own_pool : *threads),
        packed_hidden(sizes.rows * sizes.packed_row_bytes),
        sums(sizes.rows * sizes.num_tiles),
        entropy_sums(sizes.rows * sizes.num_tiles),
        logits(options.num_threads * sizes.unit_rows * kTileColumns),
        scratch(options.num_threads * kDotScratchBytes),
        chunks(head.is_strided() ? options.num_threads * kTileChunkBytes : 0),
        unit_extremes(options.num_threads * sizes.unit_rows),
        unit_rank_counts(options.num_threads * sizes.unit_rows),
        row_extremes(options.num_threads * sizes.rows),
        log2_scales(static_cast<size_t>(sizes.rows)),
        entropy_log2_scales(static_cast<size_t>(sizes.rows)),
        target_logits(static_cast<size_t>(sizes.rows)),
        rank_counts(static_cast<size_t>(sizes.rows)),
        top(sizes.rows, options.top_k_max),
        shared(sizes.rows, options) {}

  /// A row's largest logits, best first.
  struct TopList {
    const TopRows::Entry* entries = nullptr;
    int32_t count = 0;
  };

  void Begin(const ScoreRowsParams& batch, int64_t first_row, int64_t row_count);
  void ScoreTargets();
  void ScoreTarget(int64_t row, int32_t worker);
  void ScoreTiles();
  void ScoreUnit(int64_t unit, int32_t worker);
  void ComputeDots(int64_t shard_tile, int64_t first, int64_t count, int32_t worker);
  void GatherLogits(int64_t unit_begin, int64_t unit_rows, int64_t tile, const float* tile_logits);

  void FinishWholeRows();
  std::span<const Reduction> ShareMaxima();
  std::span<const Reduction> ShareSums();
  void ShareTopKeys();
  void FinishSharedRows();
  TileExtremes ExtremesOf(int64_t row) const;
  void FinishRow(int64_t row, const RowSums& row_sums, const RowSums& entropy,
                 const TileExtremes& extremes, const TopList& top_list);

  /// Returns the number of valid columns of the tile that starts with `first_column`.
  int32_t NumColumns(int64_t first_column) const {
    return static_cast<int32_t>(std::min<int64_t>(kTileColumns, head.vocab_size - first_column));
  }

  /// Calls `body(row, count)` for groups of at most kCombineRows consecutive rows, in parallel.
  template <typename Body>
  void ForEachRows(const Body& body) {
    pool.ForEach((num_rows + kCombineRows - 1) / kCombineRows,
                 [&](int64_t unit, int32_t /*worker*/) {
                   const int64_t row = unit * kCombineRows;
                   body(row, std::min(kCombineRows, num_rows - row));
                 });
  }

  const CpuHead head;
  const Options options;
  const WorkspaceSizes sizes;
  const int64_t num_tiles;
  const std::unique_ptr<ThreadPool> own_pool;  // null if the caller has threads
  LoopThreads& pool;
  AlignedArray<std::byte> packed_hidden;     // [rows, packed_row_bytes]
  AlignedArray<TileSums> sums;               // [num_tiles, rows]
  AlignedArray<TileSums> entropy_sums;       // [num_tiles, rows]
  AlignedArray<float> logits;                // [threads, unit_rows, kTileColumns]
  AlignedArray<std::byte> scratch;           // [threads, kDotScratchBytes]
  AlignedArray<std::byte> chunks;            // [threads, kTileChunkBytes], for a strided weight
  AlignedArray<TileExtremes> unit_extremes;  // [threads, unit_rows]
  AlignedArray<int32_t> unit_rank_counts;    // [threads, unit_rows]
  AlignedArray<TileExtremes> row_extremes;   // [threads, rows]
  std::vector<float> log2_scales;            // [rows]
  std::vector<float> entropy_log2_scales;    // [rows]
  std::vector<float> target_logits;          // [rows]
  std::vector<int32_t> rank_counts;          // [rows], number of logits above the target's
  TopRows top;
  std::vector<int64_t>
      candidate_offsets;  // [rows + 1], offsets into the caller's arrays; may be empty
  SharedRows shared;
  std::vector<Reduction> reductions;  // arrays that the last step returned

  // The rows of the current step.
  ScoreRowsParams params;
  int64_t row_begin = 0;
  int64_t num_rows = 0;
};

int64_t RowScorer::WorkspaceBytes(const CpuHead& head, const Options& options) {
  return WorkspaceSizesOf(head, options).bytes;
}

RowScorer::RowScorer(const CpuHead& head, const Options& options)
    : impl_(std::make_unique<Impl>(head, options, nullptr)) {}

RowScorer::RowScorer(const CpuHead& head, const Options& options, LoopThreads& threads)
    : impl_(std::make_unique<Impl>(head, options, &threads)) {}

RowScorer::~RowScorer() = default;

int64_t RowScorer::step_rows() const { return impl_->sizes.rows; }

void RowScorer::Score(const ScoreRowsParams& params) {
  for (int64_t row = 0; row < params.num_rows; row += step_rows()) {
    impl_->Begin(params, row, std::min(step_rows(), params.num_rows - row));
    if (params.target_rank != nullptr) impl_->ScoreTargets();
    impl_->ScoreTiles();
    impl_->FinishWholeRows();
  }
}

std::span<const Reduction> RowScorer::ScoreTargets(const ScoreRowsParams& params, int64_t row_begin,
                                                   int64_t num_rows) {
  impl_->Begin(params, row_begin, num_rows);
  impl_->ScoreTargets();
  impl_->reductions = {{impl_->target_logits.data(), num_rows, ReductionType::kSumInt32}};
  return impl_->reductions;
}

std::span<const Reduction> RowScorer::ScoreTiles(const ScoreRowsParams& params, int64_t row_begin,
                                                 int64_t num_rows) {
  if (params.target_rank == nullptr) impl_->Begin(params, row_begin, num_rows);
  impl_->ScoreTiles();
  return impl_->ShareMaxima();
}

std::span<const Reduction> RowScorer::SumTiles() { return impl_->ShareSums(); }

std::span<const uint64_t> RowScorer::TopKeys() {
  impl_->ShareTopKeys();
  return {impl_->shared.top_keys.data(),
          static_cast<size_t>(impl_->num_rows * impl_->params.top_k)};
}

uint64_t* RowScorer::gathered_top_keys() { return impl_->shared.gathered_keys.data(); }

void RowScorer::WriteScores() { impl_->FinishSharedRows(); }

/// Packs and prepares the rows of a step.
void RowScorer::Impl::Begin(const ScoreRowsParams& batch, int64_t first_row, int64_t row_count) {
  params = batch;
  row_begin = first_row;
  num_rows = row_count;
  const DotKernel& dots = DotKernelFor(options.isa, params.hidden_dtype, head.dtype);
  const int64_t hidden_row_bytes = head.hidden_size * DtypeBytes(params.hidden_dtype);
  const int64_t packed_row_bytes = dots.packed_row_bytes(head.hidden_size);
  const auto* hidden = static_cast<const std::byte*>(params.hidden) + row_begin * hidden_row_bytes;
  // Packing few rows takes less time than waking the threads.
  constexpr int64_t kPackRows = 32;
  pool.ForEach((num_rows + kPackRows - 1) / kPackRows, [&](int64_t unit, int32_t /*worker*/) {
    const int64_t row = unit * kPackRows;
    dots.pack_rows(params.hidden_dtype, hidden + row * hidden_row_bytes,
                   std::min(kPackRows, num_rows - row), head.hidden_size,
                   packed_hidden.get() + row * packed_row_bytes);
  });
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto i = static_cast<size_t>(row);
    log2_scales[i] = Log2Scale(params.temperatures[row_begin + row]);
    if (params.entropy_temperatures != nullptr) {
      entropy_log2_scales[i] = Log2Scale(params.entropy_temperatures[row_begin + row]);
    }
  }
  // Shards add the bits of their target logits, so shards that do not hold a row's target add zero.
  if (options.num_shards > 1) std::fill_n(target_logits.begin(), num_rows, 0.0F);
  if (WantsExtremes(params)) {
    for (int32_t worker = 0; worker < options.num_threads; ++worker) {
      std::fill_n(row_extremes.get() + worker * sizes.rows, num_rows, kNoExtremes);
    }
  }
  if (params.top_k > 0) top.Reset(num_rows, params.top_k);
  candidate_offsets.clear();
  if (params.num_candidates > 0) {
    const int32_t* rows_end = params.candidate_rows + params.num_candidates;
    for (int64_t row = 0; row <= num_rows; ++row) {
      const auto id = static_cast<int32_t>(row_begin + row);
      candidate_offsets.push_back(std::lower_bound(params.candidate_rows, rows_end, id) -
                                  params.candidate_rows);
    }
  }
}

/// Computes the logits of the targets that the shard holds, from which ranks are counted.
void RowScorer::Impl::ScoreTargets() {
  std::fill_n(rank_counts.begin(), num_rows, 0);
  pool.ForEach(num_rows, [this](int64_t row, int32_t worker) { ScoreTarget(row, worker); });
}

/// Computes the logit of a row's target if the shard holds it. It has the bits that ScoreUnit
/// computes, because these depend neither on the other rows of the block nor on their number.
void RowScorer::Impl::ScoreTarget(int64_t row, int32_t worker) {
  const int32_t target = params.targets[row_begin + row];
  const int64_t shard_tile = target / kTileColumns - head.tile_begin;
  if (target < 0 || shard_tile < 0 || shard_tile >= num_tiles) return;
  const DotKernel& dots = DotKernelFor(options.isa, params.hidden_dtype, head.dtype);
  const int64_t block_begin = row / dots.row_block * dots.row_block;
  const int64_t block_rows = std::min<int64_t>(dots.row_block, num_rows - block_begin);
  ComputeDots(shard_tile, block_begin, block_rows, worker);

  float* row_logits = logits.get() + (worker * sizes.unit_rows + row - block_begin) * kTileColumns;
  const int64_t first_column = (head.tile_begin + shard_tile) * kTileColumns;
  TileSums unused_sums;
  TileExtremes unused_extremes;
  TileStatsFor(options.isa)(CpuTileStatsParams{
      .logits = row_logits,
      .num_rows = 1,
      .first_column = static_cast<int32_t>(first_column),
      .num_columns = NumColumns(first_column),
      .transform = head.transform,
      .bias = head.bias == nullptr ? nullptr : head.bias + first_column,
      .log2_scales = &log2_scales[static_cast<size_t>(row)],
      .sums = &unused_sums,
      .extremes = &unused_extremes,
  });
  target_logits[static_cast<size_t>(row)] = row_logits[target - first_column];
}

void RowScorer::Impl::ScoreTiles() {
  const int64_t row_units = (num_rows + sizes.unit_rows - 1) / sizes.unit_rows;
  pool.ForEach(num_tiles * row_units,
               [&](int64_t unit, int32_t worker) { ScoreUnit(unit, worker); });
}

/// Computes the dot products of rows [first, first + count) of the step with a tile into the
/// worker's logits. `first` is the start of a block of packed rows.
void RowScorer::Impl::ComputeDots(int64_t shard_tile, int64_t first, int64_t count,
                                  int32_t worker) {
  const DotKernel& dots = DotKernelFor(options.isa, params.hidden_dtype, head.dtype);
  TileDotsParams tile = {
      .hidden = packed_hidden.get() + first * dots.packed_row_bytes(head.hidden_size),
      .num_rows = count,
      .hidden_size = head.hidden_size,
      .k_begin = 0,
      .k_end = head.hidden_size,
      .weight_tile = nullptr,
      .weight_dtype = head.dtype,
      .dots = logits.get() + worker * sizes.unit_rows * kTileColumns,
      .scratch = scratch.get() + worker * kDotScratchBytes,
  };
  if (!head.is_strided()) {
    tile.weight_tile = static_cast<const std::byte*>(head.packed_weight) +
                       shard_tile * PackedTileBytes(head.dtype, head.hidden_size);
    return dots.tile_dots(tile);
  }
  std::byte* const chunk = chunks.get() + worker * kTileChunkBytes;
  tile.weight_tile = chunk;
  for (int64_t k = 0; k < head.hidden_size; k += KChunk(head.dtype)) {
    tile.k_begin = k;
    tile.k_end = std::min(k + KChunk(head.dtype), head.hidden_size);
    PackTile(head.dtype, head.strided_weight.From(head.dtype, shard_tile * kTileColumns, k),
             NumColumns((head.tile_begin + shard_tile) * kTileColumns), tile.k_end - k, chunk);
    dots.tile_dots(tile);
  }
}

void RowScorer::Impl::ScoreUnit(int64_t unit, int32_t worker) {
  const int64_t row_units = (num_rows + sizes.unit_rows - 1) / sizes.unit_rows;
  const int64_t shard_tile = unit / row_units;
  const int64_t unit_begin = unit % row_units * sizes.unit_rows;
  const int64_t unit_rows = std::min(sizes.unit_rows, num_rows - unit_begin);
  const auto begin = static_cast<size_t>(unit_begin);

  ComputeDots(shard_tile, unit_begin, unit_rows, worker);
  float* tile_logits = logits.get() + worker * sizes.unit_rows * kTileColumns;
  int32_t* unit_counts = unit_rank_counts.get() + worker * sizes.unit_rows;
  const bool wants_ranks = params.target_rank != nullptr;

  TileExtremes* extremes = unit_extremes.get() + worker * sizes.unit_rows;
  const int64_t tile = head.tile_begin + shard_tile;
  const int64_t first_column = tile * kTileColumns;
  const int32_t num_columns = NumColumns(first_column);
  TileStatsFor(options.isa)(CpuTileStatsParams{
      .logits = tile_logits,
      .num_rows = unit_rows,
      .first_column = static_cast<int32_t>(first_column),
      .num_columns = num_columns,
      .transform = head.transform,
      .bias = head.bias == nullptr ? nullptr : head.bias + first_column,
      .log2_scales = &log2_scales[begin],
      .entropy_log2_scales = HasOwnEntropy(params) ? &entropy_log2_scales[begin] : nullptr,
      .wants_sum_squares = params.sum_p_squared != nullptr,
      .wants_extremes = WantsExtremes(params),
      .target_logits = wants_ranks ? &target_logits[begin] : nullptr,
      .targets = params.targets + row_begin + unit_begin,
      .sums = sums.get() + shard_tile * sizes.rows + unit_begin,
      .entropy_sums = entropy_sums.get() + shard_tile * sizes.rows + unit_begin,
      .extremes = extremes,
      .rank_counts = unit_counts,
  });

  if (wants_ranks) {
    for (int64_t row = 0; row < unit_rows; ++row) {
      if (unit_counts[row] == 0) continue;
      std::atomic_ref(rank_counts[begin + static_cast<size_t>(row)])
          .fetch_add(unit_counts[row], std::memory_order_relaxed);
    }
  }
  GatherLogits(unit_begin, unit_rows, tile, tile_logits);
  if (params.visit_logits) {
    params.visit_logits(
        {row_begin + unit_begin, unit_rows, first_column, num_columns, tile_logits});
  }
  if (WantsExtremes(params)) {
    TileExtremes* rows = row_extremes.get() + worker * sizes.rows + unit_begin;
    for (int64_t row = 0; row < unit_rows; ++row) Join(rows[row], extremes[row]);
  }
  if (params.top_k > 0) {
    for (int64_t row = 0; row < unit_rows; ++row) {
      top.Offer(unit_begin + row, tile_logits + row * kTileColumns, extremes[row].max_logit,
                static_cast<int32_t>(first_column), num_columns);
    }
  }
}

/// Copies the logits of the targets, unless ScoreTargets has computed them, and of the candidates
/// that the tile holds. candidate_logprobs holds the logits of candidates until the row is
/// finished.
void RowScorer::Impl::GatherLogits(int64_t unit_begin, int64_t unit_rows, int64_t tile,
                                   const float* tile_logits) {
  const int64_t first_column = tile * kTileColumns;
  for (int64_t row = 0; params.target_rank == nullptr && row < unit_rows; ++row) {
    const int64_t column = params.targets[row_begin + unit_begin + row] - first_column;
    if (column >= 0 && column < kTileColumns) {
      target_logits[static_cast<size_t>(unit_begin + row)] =
          tile_logits[row * kTileColumns + column];
    }
  }
  if (params.num_candidates == 0) return;
  for (int64_t row = 0; row < unit_rows; ++row) {
    const auto i = static_cast<size_t>(unit_begin + row);
    for (int64_t c = candidate_offsets[i]; c < candidate_offsets[i + 1]; ++c) {
      const int64_t column = params.candidate_ids[c] - first_column;
      if (column >= 0 && column < kTileColumns) {
        params.candidate_logprobs[c] = tile_logits[row * kTileColumns + column];
      }
    }
  }
}

/// Writes the scores of the step's rows, for a head with one shard.
void RowScorer::Impl::FinishWholeRows() {
  ForEachRows([this](int64_t first, int64_t count) {
    RowSums combined[kCombineRows];
    RowSums own_entropy[kCombineRows];
    CombineTiles(sums.get() + first, num_tiles, sizes.rows, count, combined);
    const bool has_own = HasOwnEntropy(params);
    if (has_own) {
      CombineTiles(entropy_sums.get() + first, num_tiles, sizes.rows, count, own_entropy);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = first + i;
      const TopList list = params.top_k > 0 ? TopList{top.entries(row), top.count(row)} : TopList();
      FinishRow(row, combined[i], has_own ? own_entropy[i] : combined[i], ExtremesOf(row), list);
    }
  });
}

std::span<const Reduction> RowScorer::Impl::ShareMaxima() {
  const int64_t num_sets = HasOwnEntropy(params) ? 2 : 1;
  ForEachRows([&](int64_t first, int64_t count) {
    RowSums rows[kCombineRows];
    for (int64_t set = 0; set < num_sets; ++set) {
      MaxExponents((set == 0 ? sums : entropy_sums).get() + first, num_tiles, sizes.rows, count,
                   rows);
      for (int64_t i = 0; i < count; ++i) {
        shared.exponents[static_cast<size_t>(set * num_rows + first + i)] = rows[i].exponent;
      }
    }
    if (!WantsExtremes(params)) return;
    for (int64_t row = first; row < first + count; ++row) {
      const TileExtremes extremes = ExtremesOf(row);
      const auto i = static_cast<size_t>(row);
      shared.max_keys[i] = LogitKey(extremes.max_logit, extremes.argmax);
      shared.min_keys[i] = ~OrderedBits(extremes.min_logit);
    }
  });
  reductions = {{shared.exponents.data(), num_sets * num_rows, ReductionType::kMaxInt32}};
  if (WantsExtremes(params)) {
    reductions.push_back({shared.max_keys.data(), num_rows, ReductionType::kMaxUint64});
    reductions.push_back({shared.min_keys.data(), num_rows, ReductionType::kMaxUint32});
  }
  return reductions;
}

std::span<const Reduction> RowScorer::Impl::ShareSums() {
  const int64_t num_sets = HasOwnEntropy(params) ? 2 : 1;
  ForEachRows([&](int64_t first, int64_t count) {
    for (int64_t set = 0; set < num_sets; ++set) {
      RowSums rows[kCombineRows];
      for (int64_t i = 0; i < count; ++i) {
        rows[i].exponent = shared.exponents[static_cast<size_t>(set * num_rows + first + i)];
      }
      AddTiles((set == 0 ? sums : entropy_sums).get() + first, num_tiles, sizes.rows, count, rows);
      for (int64_t i = 0; i < count; ++i) {
        int64_t* const out = &shared.sums[static_cast<size_t>(set * 3 * num_rows + first + i)];
        out[0] = rows[i].sum;
        out[num_rows] = rows[i].weighted;
        if (set == 0) out[2 * num_rows] = rows[i].sum_squares;
      }
    }
  });
  const int64_t num_fields = num_sets == 1 ? 3 : kSumFields;
  // With ranks, the shards have already added their target logits.
  void* const per_row = params.target_rank == nullptr ? static_cast<void*>(target_logits.data())
                                                      : static_cast<void*>(rank_counts.data());
  reductions = {{shared.sums.data(), num_fields * num_rows, ReductionType::kSumInt64},
                {per_row, num_rows, ReductionType::kSumInt32}};
  return reductions;
}

void RowScorer::Impl::ShareTopKeys() {
  ForEachRows([this](int64_t first, int64_t count) {
    for (int64_t row = first; row < first + count; ++row) {
      uint64_t* const keys = &shared.top_keys[static_cast<size_t>(row * params.top_k)];
      for (int32_t k = 0; k < params.top_k; ++k) {
        const TopRows::Entry* const entry = top.entries(row) + k;
        keys[k] = k < top.count(row) ? LogitKey(entry->logit, entry->id) : 0;
      }
    }
  });
}

void RowScorer::Impl::FinishSharedRows() {
  ForEachRows([this](int64_t first, int64_t count) {
    const auto num_keys =
        static_cast<size_t>(options.num_shards) * static_cast<size_t>(params.top_k);
    std::vector<uint64_t> keys(num_keys);
    std::vector<TopRows::Entry> entries;
    for (int64_t row = first; row < first + count; ++row) {
      const auto i = static_cast<size_t>(row);
      const auto rows = static_cast<size_t>(num_rows);
      const RowSums own = {shared.exponents[i], shared.sums[i], shared.sums[rows + i],
                           shared.sums[2 * rows + i]};
      const RowSums entropy = HasOwnEntropy(params)
                                  ? RowSums{shared.exponents[rows + i], shared.sums[3 * rows + i],
                                            shared.sums[4 * rows + i], 0}
                                  : own;
      const LogitEntry best = LogitEntryOf(shared.max_keys[i]);
      for (int64_t shard = 0; shard < options.num_shards; ++shard) {
        std::copy_n(shared.gathered_keys.data() + (shard * num_rows + row) * params.top_k,
                    params.top_k, keys.begin() + shard * params.top_k);
      }
      std::partial_sort(keys.begin(), keys.begin() + params.top_k, keys.end(), std::greater<>());
      entries.clear();
      for (int32_t k = 0; k < params.top_k && keys[static_cast<size_t>(k)] != 0; ++k) {
        const LogitEntry entry = LogitEntryOf(keys[static_cast<size_t>(k)]);
        entries.push_back({entry.logit, entry.id});
      }
      FinishRow(row, own, entropy, {best.logit, FromOrderedBits(~shared.min_keys[i]), best.id},
                {entries.data(), static_cast<int32_t>(entries.size())});
    }
  });
}

/// Returns the extremes of a row over the shard's tiles. -0 becomes +0, as in a LogitKey.
TileExtremes RowScorer::Impl::ExtremesOf(int64_t row) const {
  if (!WantsExtremes(params)) return kNoExtremes;
  TileExtremes extremes = row_extremes.get()[row];
  for (int32_t worker = 1; worker < options.num_threads; ++worker) {
    Join(extremes, row_extremes.get()[worker * sizes.rows + row]);
  }
  extremes.max_logit += 0.0F;
  extremes.min_logit += 0.0F;
  return extremes;
}

void RowScorer::Impl::FinishRow(int64_t row, const RowSums& row_sums, const RowSums& entropy,
                                const TileExtremes& extremes, const TopList& top_list) {
  const int64_t out = row_begin + row;
  const auto i = static_cast<size_t>(row);
  const float log2_scale = log2_scales[i];
  const RowNormalizer normalizer = NormalizerOf(row_sums);
  const bool finite = normalizer.finite;
  params.nonfinite[out] = finite ? 0 : 1;
  if (params.logprob != nullptr) {
    params.logprob[out] = LogprobOf(target_logits[i], log2_scale, normalizer);
  }
  if (params.lse != nullptr) params.lse[out] = LseOf(normalizer);
  if (params.lse_rest != nullptr) params.lse_rest[out] = LseRestOf(normalizer);
  if (params.sum_p_squared != nullptr) {
    params.sum_p_squared[out] = SumPSquaredOf(row_sums, normalizer);
  }
  if (params.entropy != nullptr) {
    params.entropy[out] = EntropyOf(entropy, NormalizerOf(entropy), head.vocab_size);
  }
  if (params.argmax_id != nullptr) params.argmax_id[out] = finite ? extremes.argmax : -1;
  if (params.argmax_logprob != nullptr) {
    params.argmax_logprob[out] = LogprobOf(extremes.max_logit, log2_scale, normalizer);
  }
  if (params.max_logit != nullptr) params.max_logit[out] = finite ? extremes.max_logit : kNan;
  if (params.min_logit != nullptr) params.min_logit[out] = finite ? extremes.min_logit : kNan;
  if (params.target_rank != nullptr) params.target_rank[out] = finite ? rank_counts[i] : -1;
  for (int32_t k = 0; k < params.top_k; ++k) {
    const int64_t at = out * params.top_k + k;
    const bool exists = finite && k < top_list.count;
    params.top_k_ids[at] = exists ? top_list.entries[k].id : -1;
    params.top_k_logprobs[at] =
        exists ? LogprobOf(top_list.entries[k].logit, log2_scale, normalizer) : kNan;
  }
  if (params.num_candidates > 0) {
    for (int64_t c = candidate_offsets[i]; c < candidate_offsets[i + 1]; ++c) {
      params.candidate_logprobs[c] =
          LogprobOf(params.candidate_logprobs[c], log2_scale, normalizer);
    }
  }
}

}  // namespace logprobd::kernels
