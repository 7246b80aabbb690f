#include "server/engine/workspace_plan.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "kernels/combine/exchange_mailbox.h"
#include "kernels/common/dtype.h"
#include "kernels/common/tile.h"
#include "kernels/fused/top_k_scratch.h"
#include "server/base/scoring_engine.h"

namespace logprobd {
namespace {

using kernels::AlignToArena;
using kernels::kArenaAlignment;
using kernels::kHiddenSplits;
using kernels::kTileColumns;
using kernels::SplitPitch;
using kernels::TileSums;

constexpr int64_t kWidestElementBytes = 4;
constexpr int64_t kHiddenBytesMax = int64_t{64} << 20;
constexpr int64_t kConvertedWeightBytes = int64_t{32} << 20;
/// This limit is smaller, because the fused path leaves little work for the chunked path.
constexpr int64_t kConvertedWeightBytesWithFused = int64_t{12} << 20;
/// A tile has TileSums at two temperatures.
constexpr int64_t kPartialBytesPerTile = 2 * int64_t{sizeof(TileSums)};
/// Maximum number of rows of one fused launch; more rows do not make it faster per row. Counts of
/// at least kFusedGranularity rows are multiples of it, so that they fill the kernel's clusters.
constexpr int64_t kFusedRowsMax = 8'192;
constexpr int64_t kFusedGranularity = 512;
/// Limits of the chunked path next to the fused path, which takes most of the rows.
constexpr int64_t kBlockRowsWithFused = 512;
constexpr int64_t kLogitsBytesWithFused = int64_t{34} << 20;
constexpr int64_t kTopKEntryBytes = 8;
/// The inputs are a target and two scales of four bytes each; the scores follow.
constexpr int64_t kSlotBytesPerRow = int64_t{3} * 4 + kRowScoreBytes;
/// The inputs are a row and an id, and the output is a logprob, of four bytes each.
constexpr int64_t kSlotBytesPerCandidate = int64_t{3} * 4;

/// Size of the output of one thread block of the GEMM that cuBLASLt chooses on Hopper for a large
/// bf16 product. With another GEMM, the chunk sizes are less efficient but still fit.
constexpr int64_t kGemmBlockColumns = 256;
constexpr int64_t kGemmBlockRows = 128;
/// Cost of a wave of thread blocks, in units of the cost of a chunk's launches and their ramps,
/// which take about a seventh of a wave (H=4096).
constexpr int64_t kWaveCost = 7;
constexpr int64_t kChunkCost = 1;

int64_t CeilDivide(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

int64_t RoundDownRows(int64_t rows) {
  return std::max(rows / kRowGranularity * kRowGranularity, kRowGranularity);
}

/// Returns the bytes of a hidden row or a weight row in the widest form that a product may need.
int64_t WidestRowBytes(const WorkspacePlan& plan) {
  return std::max(plan.padded_hidden * kWidestElementBytes,
                  SplitPitch(plan.hidden_size) * kHiddenSplits * 2);
}

/// Returns the bytes for the keys of the longest top-k lists of `rows` rows, plus the larger of the
/// fused path's scratch for a search of `rows_at_once` rows and the lists of all shards.
int64_t ListBytes(const WorkspacePlan& plan, int64_t rows, int64_t rows_at_once) {
  if (plan.top_k_max == 0) return 0;
  return WorkspacePlan::TopKKeyBytes(rows, plan.top_k_max) +
         std::max(
             kernels::TopKScratchOf(rows_at_once, plan.top_k_max, plan.num_tiles_max).size_bytes,
             plan.GatheredKeyBytes(rows, plan.top_k_max)) +
         kArenaAlignment;
}

/// Returns the largest WorkspacePlan::TargetProductOf of one group of rows.
int64_t WidestTargetProductBytes(const WorkspacePlan& plan) {
  int64_t bytes = 0;
  for (const kernels::Dtype dtype :
       {kernels::Dtype::kBf16, kernels::Dtype::kF16, kernels::Dtype::kF32}) {
    bytes = std::max(bytes, plan.TargetProductOf(dtype, kRowGranularity).bytes);
  }
  return bytes;
}

void SizeBuffers(WorkspacePlan& plan, const WorkspacePlanOptions& options) {
  const int64_t widest_row = WidestRowBytes(plan);
  const int64_t hidden_rows =
      plan.with_fused ? std::max(plan.block_rows, plan.row_state_rows) : plan.block_rows;
  const int64_t least_hidden = kRowGranularity * (widest_row + plan.padded_hidden * 4);
  plan.hidden_bytes =
      AlignToArena(std::max(std::min(hidden_rows * widest_row, kHiddenBytesMax), least_hidden));
  const int64_t tile_logits = kTileColumns * int64_t{sizeof(float)};
  const int64_t whole = plan.block_rows * plan.num_tiles_max * tile_logits;
  plan.logits_bytes =
      AlignToArena(std::max(std::min(options.logits_bytes, whole), plan.block_rows * tile_logits));
  const int64_t tile_weight = kTileColumns * widest_row;
  plan.converted_weight_bytes =
      plan.head_dtype == kernels::Dtype::kF32
          ? 0
          : AlignToArena(std::max(
                std::min(plan.with_fused ? kConvertedWeightBytesWithFused : kConvertedWeightBytes,
                         plan.num_tiles_max * tile_weight),
                tile_weight));
  plan.partial_bytes = AlignToArena(plan.block_rows * plan.num_tiles_max * kPartialBytesPerTile);
  kernels::Arena row_state;
  PlaceRowState(plan, row_state);
  plan.row_state_bytes = row_state.size();
  plan.slot_bytes =
      AlignToArena(plan.batch_rows_max * (kSlotBytesPerRow + plan.top_k_max * kTopKEntryBytes) +
                   plan.candidates_per_pass * kSlotBytesPerCandidate);
  plan.gemm_bytes = (plan.head_dtype == kernels::Dtype::kF32 ? 1 : 2) * kGemmCounterBytes;
  plan.arena_bytes = std::max({plan.logits_bytes + plan.converted_weight_bytes + plan.partial_bytes,
                               plan.GatheredKeyBytes(plan.block_rows, plan.top_k_max),
                               WidestTargetProductBytes(plan)});
  if (plan.with_fused) {
    plan.arena_bytes = std::max(plan.arena_bytes, ListBytes(plan, kRowGranularity, 1));
  }
  plan.workspace_bytes = ScoringEngine::kBatchesInFlight * (plan.hidden_bytes + plan.slot_bytes) +
                         plan.arena_bytes + plan.row_state_bytes + plan.gemm_bytes +
                         plan.exchange_bytes;
}

bool Fits(const WorkspacePlan& plan, const WorkspacePlanOptions& options) {
  return plan.workspace_bytes <= options.workspace_bytes_max &&
         (!plan.with_fused || plan.arena_bytes + plan.row_state_bytes + plan.gemm_bytes <=
                                  options.fused_workspace_bytes);
}

}  // namespace

int64_t WorkspacePlan::weight_bytes() const {
  return num_tiles * kTileColumns * padded_hidden * kernels::DtypeBytes(head_dtype);
}

ProductForm WorkspacePlan::ProductFormOf(kernels::Dtype hidden_dtype) const {
  if (hidden_dtype == head_dtype) return ProductForm::kNative;
  return head_dtype == kernels::Dtype::kBf16 ? ProductForm::kBf16Split : ProductForm::kWidened;
}

int64_t WorkspacePlan::MultipliedRowBytes(kernels::Dtype hidden_dtype) const {
  switch (ProductFormOf(hidden_dtype)) {
    case ProductForm::kNative:
      return padded_hidden * kernels::DtypeBytes(hidden_dtype);
    case ProductForm::kBf16Split:
      return SplitPitch(hidden_size) * kHiddenSplits * kernels::DtypeBytes(kernels::Dtype::kBf16);
    case ProductForm::kWidened:
      break;
  }
  return padded_hidden * kWidestElementBytes;
}

int64_t WorkspacePlan::SourceRowBytes(kernels::Dtype hidden_dtype) const {
  const ProductForm form = ProductFormOf(hidden_dtype);
  const bool is_multiplied_as_given =
      form == ProductForm::kNative ||
      (form == ProductForm::kWidened && hidden_dtype == kernels::Dtype::kF32);
  return is_multiplied_as_given ? 0 : padded_hidden * kernels::DtypeBytes(hidden_dtype);
}

int64_t WorkspacePlan::HiddenRows(kernels::Dtype hidden_dtype) const {
  return RoundDownRows(hidden_bytes /
                       (MultipliedRowBytes(hidden_dtype) + SourceRowBytes(hidden_dtype)));
}

int64_t WorkspacePlan::HiddenOffset(kernels::Dtype hidden_dtype) const {
  return SourceRowBytes(hidden_dtype) == 0
             ? 0
             : HiddenRows(hidden_dtype) * MultipliedRowBytes(hidden_dtype);
}

int64_t WorkspacePlan::BlockRows(kernels::Dtype hidden_dtype) const {
  return std::min(block_rows, HiddenRows(hidden_dtype));
}

TargetProduct WorkspacePlan::TargetProductOf(kernels::Dtype hidden_dtype, int64_t rows) const {
  TargetProduct product;
  kernels::Arena arena;
  arena.Take<std::byte>(rows * padded_hidden * kernels::DtypeBytes(head_dtype));
  product.converted_offset = arena.size();
  arena.Take<std::byte>(rows * MultipliedRowBytes(hidden_dtype), ConvertsWeight(hidden_dtype));
  product.dots_offset = arena.size();
  arena.Take<float>(rows * rows);
  product.bytes = arena.size();
  return product;
}

int64_t WorkspacePlan::TopKKeyBytes(int64_t rows, int32_t top_k) {
  return AlignToArena(rows * top_k * kTopKEntryBytes);
}

int64_t WorkspacePlan::GatheredKeyBytes(int64_t rows, int32_t top_k) const {
  return num_shards == 1 ? 0 : num_shards * rows * top_k * kTopKEntryBytes;
}

int64_t WorkspacePlan::FusedRows(kernels::Dtype hidden_dtype, int num_sums, int32_t top_k) const {
  const int64_t tile_bytes =
      num_sums * int64_t{sizeof(TileSums)} + (top_k > 0 ? int64_t{sizeof(float)} : 0);
  const int64_t row_bytes = num_tiles_max * tile_bytes + top_k * kTopKEntryBytes;
  int64_t rows = std::min(
      {(arena_bytes - kArenaAlignment) / row_bytes, HiddenRows(hidden_dtype), row_state_rows});
  if (top_k > 0) {
    // After the combine, the scratch of the search overwrites the partials, and then the lists of
    // all shards do.
    const int64_t scratch = kernels::TopKScratchOf(1, top_k, num_tiles_max).size_bytes;
    const int64_t row_keys = top_k * kTopKEntryBytes;
    rows = std::min({rows, (arena_bytes - kArenaAlignment - scratch) / row_keys,
                     (arena_bytes - kArenaAlignment) / (row_keys + GatheredKeyBytes(1, top_k))});
  }
  return rows >= kFusedGranularity ? rows / kFusedGranularity * kFusedGranularity
                                   : RoundDownRows(rows);
}

int64_t WorkspacePlan::ChunkTiles(kernels::Dtype hidden_dtype, int64_t rows) const {
  int64_t tiles = logits_bytes / (PadRows(rows) * kTileColumns * int64_t{sizeof(float)});
  if (ConvertsWeight(hidden_dtype)) {
    tiles =
        std::min(tiles, converted_weight_bytes / (kTileColumns * MultipliedRowBytes(hidden_dtype)));
  }
  const int64_t tiles_max = std::clamp(tiles, int64_t{1}, num_tiles);
  const auto waves = [&](int64_t chunk_tiles) {
    const int64_t blocks = CeilDivide(chunk_tiles * kTileColumns, kGemmBlockColumns) *
                           CeilDivide(PadRows(rows), kGemmBlockRows);
    return CeilDivide(blocks, num_sms);
  };
  int64_t best_tiles = tiles_max;
  int64_t best_cost = std::numeric_limits<int64_t>::max();
  for (int64_t count = tiles_max; count >= 1; --count) {
    const int64_t whole_chunks = num_tiles / count;
    const int64_t rest = num_tiles % count;
    const int64_t chunks = whole_chunks + (rest > 0 ? 1 : 0);
    if (chunks * kChunkCost >= best_cost) {
      break;  // Smaller counts only add chunks.
    }
    const int64_t cost = kWaveCost * (whole_chunks * waves(count) + (rest > 0 ? waves(rest) : 0)) +
                         kChunkCost * chunks;
    if (cost < best_cost) {
      best_cost = cost;
      best_tiles = count;
    }
  }
  return best_tiles;
}

RowState PlaceRowState(const WorkspacePlan& plan, kernels::Arena& arena) {
  const int64_t rows = plan.row_state_rows;
  const bool is_sharded = plan.num_shards > 1;
  RowState state;
  state.normalizers = arena.Take<kernels::RowNormalizer>(rows);
  state.max_keys = arena.Take<uint64_t>(rows);
  state.chunked_top_k_keys = arena.Take<uint64_t>(plan.block_rows * plan.top_k_max);
  state.target_logits = arena.Take<float>(rows);
  state.min_keys = arena.Take<uint32_t>(rows);
  state.rank_counts = arena.Take<int32_t>(rows);
  state.row_sums = arena.Take<int64_t>(kSharedSumFields * rows, is_sharded);
  state.exponents = arena.Take<int32_t>(2 * rows, is_sharded);
  return state;
}

WorkspacePlan PlanWorkspace(const WorkspacePlanOptions& options) {
  WorkspacePlan plan;
  plan.vocab_size = options.vocab_size;
  plan.hidden_size = options.hidden_size;
  plan.head_dtype = options.head_dtype;
  plan.batch_rows_max = options.batch_rows_max;
  plan.top_k_max = options.top_k_max;
  plan.candidates_per_pass = options.candidates_per_pass;
  plan.num_sms = options.num_sms;
  plan.num_shards = options.num_shards;
  plan.tile_begin = options.tile_begin;
  plan.num_tiles =
      (options.tile_end > 0 ? options.tile_end : kernels::NumTiles(options.vocab_size)) -
      options.tile_begin;
  plan.num_tiles_max = CeilDivide(kernels::NumTiles(options.vocab_size), options.num_shards);
  plan.exchange_bytes =
      options.num_shards == 1
          ? 0
          : AlignToArena(kernels::MailboxBytes(options.num_shards, kExchangeSliceBytes));
  plan.padded_hidden = (options.hidden_size + 7) / 8 * 8;
  plan.block_rows =
      std::min(RoundDownRows(options.block_rows_max), PadRows(options.batch_rows_max));
  plan.with_fused = options.with_fused;
  plan.row_state_rows =
      plan.with_fused ? std::min(PadRows(options.batch_rows_max), kFusedRowsMax) : plan.block_rows;
  WorkspacePlanOptions sized = options;
  if (plan.with_fused) {
    plan.block_rows = std::min(plan.block_rows, kBlockRowsWithFused);
    sized.logits_bytes = std::min(sized.logits_bytes, kLogitsBytesWithFused);
  }
  SizeBuffers(plan, sized);
  while (!Fits(plan, options) && plan.block_rows > kRowGranularity) {
    plan.block_rows = RoundDownRows(plan.block_rows / 2);
    if (!plan.with_fused) plan.row_state_rows = plan.block_rows;
    SizeBuffers(plan, sized);
  }
  while (!Fits(plan, options) && sized.logits_bytes > 1) {
    sized.logits_bytes /= 2;
    SizeBuffers(plan, sized);
  }
  if (plan.with_fused) {
    // The arena grows to the bound, but not beyond the size that the largest block can use.
    const int64_t room = std::min(
        options.fused_workspace_bytes - plan.row_state_bytes - plan.gemm_bytes - kArenaAlignment,
        options.workspace_bytes_max - plan.workspace_bytes + plan.arena_bytes);
    const int64_t useful = std::max(plan.row_state_rows * plan.num_tiles_max * kPartialBytesPerTile,
                                    ListBytes(plan, plan.row_state_rows, plan.row_state_rows));
    const int64_t grown =
        std::max(plan.arena_bytes, std::min(room, useful) / kArenaAlignment * kArenaAlignment);
    plan.workspace_bytes += grown - plan.arena_bytes;
    plan.arena_bytes = grown;
  }
  return plan;
}

}  // namespace logprobd
