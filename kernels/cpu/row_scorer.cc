#include "kernels/cpu/row_scorer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"
#include "kernels/cpu/combine_tiles.h"
#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/tile_kernels.h"
#include "kernels/cpu/top_rows.h"

namespace logprobd::kernels {
namespace {

constexpr size_t kAlignment = 64;
constexpr int64_t kMiB = int64_t{1} << 20;

/// Rows of a unit of work: their tile of logits stays in the second-level cache.
constexpr int64_t kUnitRowsMax = 256;
constexpr int64_t kRowBlockMax = 16;

/// More rows between packing and combining would not make the weight's passes visibly cheaper.
constexpr int64_t kRowsMax = 2048;

/// What a workspace may take, and how much of it the threads' own parts.
constexpr int64_t kWorkspaceBytesMax = 48 * kMiB;
constexpr int64_t kThreadsBytesMax = 26 * kMiB;

constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Memory aligned for the kernels, not initialised.
template <typename T>
class AlignedArray {
 public:
  explicit AlignedArray(int64_t count)
      : data_(static_cast<T*>(::operator new (static_cast<size_t>(count) * sizeof(T),
                                              std::align_val_t{kAlignment}))) {}
  ~AlignedArray() { ::operator delete (data_, std::align_val_t{kAlignment}); }
  AlignedArray(const AlignedArray&) = delete;
  AlignedArray& operator=(const AlignedArray&) = delete;
  T* get() const { return data_; }

 private:
  T* data_;
};

/// How large the parts of a workspace are.
struct Sizes {
  int64_t num_tiles;
  int64_t rows;       ///< Rows between packing and combining.
  int64_t unit_rows;  ///< Rows of a unit of work.
  int64_t packed_row_bytes;
  int64_t bytes;  ///< Of it all.
};

Sizes SizesOf(const CpuHead& head, const RowScorer::Options& options) {
  Sizes sizes{};
  sizes.num_tiles = NumTiles(head.vocab_size);
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    const DotKernel& dots = DotKernelFor(options.isa, dtype, head.dtype);
    sizes.packed_row_bytes =
        std::max(sizes.packed_row_bytes, dots.packed_row_bytes(head.hidden_size));
  }
  constexpr int64_t kUnitRowBytes = kTileColumns * sizeof(float) + sizeof(TileExtremes);
  const int64_t thread_bytes_max = kThreadsBytesMax / options.num_threads;
  sizes.unit_rows = kUnitRowsMax;
  while (sizes.unit_rows > kRowBlockMax &&
         sizes.unit_rows * kUnitRowBytes + kDotScratchBytes > thread_bytes_max) {
    sizes.unit_rows /= 2;
  }
  const int64_t threads_bytes =
      options.num_threads * (sizes.unit_rows * kUnitRowBytes + kDotScratchBytes);
  // Packed hidden, two sets of sums, extremes of every thread, scales, target, candidates' place.
  const int64_t row_bytes = sizes.packed_row_bytes +
                            sizes.num_tiles * 2 * static_cast<int64_t>(sizeof(TileSums)) +
                            options.num_threads * static_cast<int64_t>(sizeof(TileExtremes)) + 20 +
                            TopRows::BytesOfRow(options.top_k_max);
  sizes.rows = std::min({(kWorkspaceBytesMax - threads_bytes) / row_bytes, kRowsMax,
                         RoundUp(options.batch_rows_max, kRowBlockMax)});
  // Whole units where there are several; never less than a block.
  const int64_t multiple = sizes.rows >= sizes.unit_rows ? sizes.unit_rows : kRowBlockMax;
  sizes.rows = std::max(sizes.rows / multiple * multiple, kRowBlockMax);
  sizes.unit_rows = std::min(sizes.unit_rows, sizes.rows);
  sizes.bytes = threads_bytes + sizes.rows * row_bytes;
  return sizes;
}

/// Largest and smallest logit of a row over the tiles that one thread saw.
void Join(TileExtremes& row, const TileExtremes& tile) {
  if (tile.max_logit > row.max_logit ||
      (tile.max_logit == row.max_logit && tile.argmax < row.argmax)) {
    row.max_logit = tile.max_logit;
    row.argmax = tile.argmax;
  }
  row.min_logit = std::min(row.min_logit, tile.min_logit);
}

constexpr TileExtremes kNoExtremes = {-std::numeric_limits<float>::infinity(),
                                      std::numeric_limits<float>::infinity(),
                                      std::numeric_limits<int32_t>::max()};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace

struct RowScorer::Impl {
  Impl(const CpuHead& head_given, const Options& options_given)
      : head(head_given),
        options(options_given),
        sizes(SizesOf(head, options)),
        pool(options.num_threads),
        packed_hidden(sizes.rows * sizes.packed_row_bytes),
        sums(sizes.rows * sizes.num_tiles),
        entropy_sums(sizes.rows * sizes.num_tiles),
        logits(options.num_threads * sizes.unit_rows * kTileColumns),
        scratch(options.num_threads * kDotScratchBytes),
        unit_extremes(options.num_threads * sizes.unit_rows),
        row_extremes(options.num_threads * sizes.rows),
        log2_scales(static_cast<size_t>(sizes.rows)),
        entropy_log2_scales(static_cast<size_t>(sizes.rows)),
        target_logits(static_cast<size_t>(sizes.rows)),
        top(sizes.rows, options.top_k_max) {}

  void ScoreChunk(const ScoreRowsParams& params, int64_t row_begin, int64_t num_rows);
  void ScoreUnit(const ScoreRowsParams& params, int64_t row_begin, int64_t num_rows, int64_t unit,
                 int32_t worker);
  void GatherLogits(const ScoreRowsParams& params, int64_t row_begin, int64_t unit_begin,
                    int64_t unit_rows, int64_t tile, const float* tile_logits);
  void FinishRows(const ScoreRowsParams& params, int64_t row_begin, int64_t chunk_row,
                  int64_t num_rows);
  void FinishRow(const ScoreRowsParams& params, int64_t row_begin, int64_t row,
                 const RowSums& row_sums, const RowSums& entropy);

  bool wants_extremes(const ScoreRowsParams& params) const {
    return params.argmax_id != nullptr || params.max_logit != nullptr ||
           params.min_logit != nullptr;
  }

  const CpuHead head;
  const Options options;
  const Sizes sizes;
  ThreadPool pool;
  AlignedArray<std::byte> packed_hidden;     // [rows, packed_row_bytes]
  AlignedArray<TileSums> sums;               // [num_tiles, rows]
  AlignedArray<TileSums> entropy_sums;       // [num_tiles, rows]
  AlignedArray<float> logits;                // [threads, unit_rows, kTileColumns]
  AlignedArray<std::byte> scratch;           // [threads, kDotScratchBytes]
  AlignedArray<TileExtremes> unit_extremes;  // [threads, unit_rows]
  AlignedArray<TileExtremes> row_extremes;   // [threads, rows]
  std::vector<float> log2_scales;            // [rows]
  std::vector<float> entropy_log2_scales;    // [rows]
  std::vector<float> target_logits;          // [rows]
  TopRows top;
  std::vector<int64_t> candidate_offsets;  // [rows + 1], into the caller's arrays; or empty.
};

int64_t RowScorer::WorkspaceBytes(const CpuHead& head, const Options& options) {
  return SizesOf(head, options).bytes;
}

RowScorer::RowScorer(const CpuHead& head, const Options& options)
    : impl_(std::make_unique<Impl>(head, options)) {}

RowScorer::~RowScorer() = default;

void RowScorer::Score(const ScoreRowsParams& params) {
  for (int64_t row = 0; row < params.num_rows; row += impl_->sizes.rows) {
    impl_->ScoreChunk(params, row, std::min(impl_->sizes.rows, params.num_rows - row));
  }
}

void RowScorer::Impl::ScoreChunk(const ScoreRowsParams& params, int64_t row_begin,
                                 int64_t num_rows) {
  const DotKernel& dots = DotKernelFor(options.isa, params.hidden_dtype, head.dtype);
  const int64_t hidden_row_bytes = head.hidden_size * DtypeBytes(params.hidden_dtype);
  const int64_t packed_row_bytes = dots.packed_row_bytes(head.hidden_size);
  const auto* hidden = static_cast<const std::byte*>(params.hidden) + row_begin * hidden_row_bytes;
  // Few rows are packed faster than the threads wake.
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
  if (wants_extremes(params)) {
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

  const int64_t row_units = (num_rows + sizes.unit_rows - 1) / sizes.unit_rows;
  pool.ForEach(sizes.num_tiles * row_units, [&](int64_t unit, int32_t worker) {
    ScoreUnit(params, row_begin, num_rows, unit, worker);
  });

  pool.ForEach((num_rows + kCombineRows - 1) / kCombineRows, [&](int64_t unit, int32_t /*worker*/) {
    const int64_t row = unit * kCombineRows;
    FinishRows(params, row_begin, row, std::min(kCombineRows, num_rows - row));
  });
}

void RowScorer::Impl::ScoreUnit(const ScoreRowsParams& params, int64_t row_begin, int64_t num_rows,
                                int64_t unit, int32_t worker) {
  const int64_t row_units = (num_rows + sizes.unit_rows - 1) / sizes.unit_rows;
  const int64_t tile = unit / row_units;
  const int64_t unit_begin = unit % row_units * sizes.unit_rows;
  const int64_t unit_rows = std::min(sizes.unit_rows, num_rows - unit_begin);
  const auto begin = static_cast<size_t>(unit_begin);

  const DotKernel& dots = DotKernelFor(options.isa, params.hidden_dtype, head.dtype);
  float* tile_logits = logits.get() + worker * sizes.unit_rows * kTileColumns;
  dots.tile_dots(TileDotsParams{
      .hidden = packed_hidden.get() + unit_begin * dots.packed_row_bytes(head.hidden_size),
      .num_rows = unit_rows,
      .hidden_size = head.hidden_size,
      .weight_tile = static_cast<const std::byte*>(head.packed_weight) +
                     tile * PackedTileBytes(head.dtype, head.hidden_size),
      .weight_dtype = head.dtype,
      .dots = tile_logits,
      .scratch = scratch.get() + worker * kDotScratchBytes,
  });

  const bool own_entropy = params.entropy_temperatures != nullptr && params.entropy != nullptr;
  TileExtremes* extremes = unit_extremes.get() + worker * sizes.unit_rows;
  const int64_t first_column = tile * kTileColumns;
  const auto num_columns =
      static_cast<int32_t>(std::min<int64_t>(kTileColumns, head.vocab_size - first_column));
  TileStatsFor(options.isa)(TileStatsParams{
      .logits = tile_logits,
      .num_rows = unit_rows,
      .first_column = static_cast<int32_t>(first_column),
      .num_columns = num_columns,
      .transform = head.transform,
      .bias = head.bias == nullptr ? nullptr : head.bias + first_column,
      .log2_scales = &log2_scales[begin],
      .entropy_log2_scales = own_entropy ? &entropy_log2_scales[begin] : nullptr,
      .squares = params.sum_p_squared != nullptr,
      .extremes_wanted = wants_extremes(params),
      .sums = sums.get() + tile * sizes.rows + unit_begin,
      .entropy_sums = entropy_sums.get() + tile * sizes.rows + unit_begin,
      .extremes = extremes,
  });

  GatherLogits(params, row_begin, unit_begin, unit_rows, tile, tile_logits);
  if (wants_extremes(params)) {
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

/// Takes the logits of the targets and candidates that lie in the tile. A candidate's place in the
/// results holds its logit until the row is finished.
void RowScorer::Impl::GatherLogits(const ScoreRowsParams& params, int64_t row_begin,
                                   int64_t unit_begin, int64_t unit_rows, int64_t tile,
                                   const float* tile_logits) {
  const int64_t first_column = tile * kTileColumns;
  for (int64_t row = 0; row < unit_rows; ++row) {
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

/// Rows [chunk_row, chunk_row + num_rows) of the chunk, at most kCombineRows.
void RowScorer::Impl::FinishRows(const ScoreRowsParams& params, int64_t row_begin,
                                 int64_t chunk_row, int64_t num_rows) {
  RowSums combined[kCombineRows];
  RowSums own_entropy[kCombineRows];
  CombineTiles(sums.get() + chunk_row, sizes.num_tiles, sizes.rows, num_rows, combined);
  const bool has_own = params.entropy_temperatures != nullptr && params.entropy != nullptr;
  if (has_own) {
    CombineTiles(entropy_sums.get() + chunk_row, sizes.num_tiles, sizes.rows, num_rows,
                 own_entropy);
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    FinishRow(params, row_begin, chunk_row + row, combined[row],
              has_own ? own_entropy[row] : combined[row]);
  }
}

void RowScorer::Impl::FinishRow(const ScoreRowsParams& params, int64_t row_begin, int64_t row,
                                const RowSums& row_sums, const RowSums& entropy) {
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
  if (params.sum_p_squared != nullptr) {
    params.sum_p_squared[out] = SumPSquaredOf(row_sums, normalizer);
  }
  if (params.entropy != nullptr) {
    params.entropy[out] = EntropyOf(entropy, NormalizerOf(entropy), head.vocab_size);
  }
  if (wants_extremes(params)) {
    TileExtremes extremes = row_extremes.get()[row];
    for (int32_t worker = 1; worker < options.num_threads; ++worker) {
      Join(extremes, row_extremes.get()[worker * sizes.rows + row]);
    }
    if (params.argmax_id != nullptr) params.argmax_id[out] = finite ? extremes.argmax : -1;
    if (params.argmax_logprob != nullptr) {
      params.argmax_logprob[out] = LogprobOf(extremes.max_logit, log2_scale, normalizer);
    }
    if (params.max_logit != nullptr) params.max_logit[out] = finite ? extremes.max_logit : kNan;
    if (params.min_logit != nullptr) params.min_logit[out] = finite ? extremes.min_logit : kNan;
  }
  for (int32_t k = 0; k < params.top_k; ++k) {
    const int64_t at = out * params.top_k + k;
    const bool exists = finite && k < top.count(row);
    params.top_k_ids[at] = exists ? top.entries(row)[k].id : -1;
    params.top_k_logprobs[at] =
        exists ? LogprobOf(top.entries(row)[k].logit, log2_scale, normalizer) : kNan;
  }
  if (params.num_candidates > 0) {
    for (int64_t c = candidate_offsets[i]; c < candidate_offsets[i + 1]; ++c) {
      params.candidate_logprobs[c] =
          LogprobOf(params.candidate_logprobs[c], log2_scale, normalizer);
    }
  }
}

}  // namespace logprobd::kernels
