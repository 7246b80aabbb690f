// SelectTilesKernel, SelectLogitsKernel: each row's k largest logits, by way of its k largest
// tiles.
//
// Idea      Every logit outside the k tiles with the largest maxima has k better ones: the maxima.
//           The tiles' logits are made once more and searched; the least of the maxima is a floor
//           that few of them pass.
// Work      A block a row.
// Traffic   4 bytes a tile, and 768 a listed tile.
// Numerics  Exact.
// Limits    k <= kTopKMax.
// Source    Our own.

#include <algorithm>

#include "kernels/common/top_k.cuh"
#include "kernels/fused_sm90/fused_top_k.h"
#include "kernels/fused_sm90/operands.h"
#include "kernels/fused_sm90/tile_groups.h"
#include "kernels/fused_sm90/tile_logits.h"
#include "kernels/fused_sm90/top_k_scratch.h"

namespace logprobd::kernels {
namespace {

constexpr int64_t kAlignment = 256;
/// Pairs of a tile up to which a block of kTopKGroupPairsMin is enough for most.
constexpr int64_t kFewPairs = 56;
/// Pairs of the larger block.
constexpr int64_t kTopKGroupPairsMax = 192;

/// A row's tiles, counted from the shard's first, as all tiles here.
struct RowTiles {
  const float* maxima;

  __device__ __forceinline__ float Load(int32_t tile) const { return maxima[tile]; }
  __device__ __forceinline__ uint64_t Key(int32_t tile, float maximum) const {
    return LogitKey(maximum, tile);
  }
};

__global__ void __launch_bounds__(kTopKThreads)
    SelectTilesKernel(const float* tile_max, int32_t num_tiles, int top_k, uint64_t* keys) {
  const int64_t row = blockIdx.x;
  FindTopK(RowTiles{tile_max + row * num_tiles}, num_tiles, top_k, {}, keys + row * top_k);
}

/// The shard's columns of the vocabulary.
struct ShardColumns {
  int32_t first_id;
  int32_t count;
};

/// The logits of a row's picked tiles.
struct PickedLogits {
  const uint64_t* tile_keys;
  const float* logits;  // [top_k, 192]
  ShardColumns columns;
  uint64_t floor;

  __device__ __forceinline__ float Load(int32_t place) const { return logits[place]; }
  __device__ __forceinline__ uint64_t Key(int32_t place, float logit) const {
    if (LogitKey(logit, 0) <= floor) return 0;  // most: the rest is spared
    const uint64_t tile_key = tile_keys[place / kTileColumns];
    if (tile_key == 0) return 0;
    const int32_t column = LogitEntryOf(tile_key).id * kTileColumns + place % kTileColumns;
    return column < columns.count ? LogitKey(logit, columns.first_id + column) : 0;
  }
};

/// `keys` holds the row's tiles and gets its ids.
__global__ void __launch_bounds__(kTopKThreads)
    SelectLogitsKernel(const float* logits, ShardColumns columns, int top_k, uint64_t* keys) {
  const int64_t row = blockIdx.x;
  uint64_t* const row_keys = keys + row * top_k;
  const int32_t num_columns = top_k * kTileColumns;
  // All keys of logits as large as the least maximum lie above; 0 where there are fewer tiles.
  const uint64_t least = row_keys[top_k - 1] >> 32;
  const uint64_t floor = least == 0 ? 0 : (least << 32) - 1;
  __syncthreads();  // before anyone writes the keys
  FindTopK(PickedLogits{row_keys, logits + row * num_columns, columns, floor}, num_columns, top_k,
           {.floor = floor}, row_keys);
}

int64_t NumShardTiles(const FusedPartialsParams& params) {
  return params.tile_end - params.tile_begin;
}

/// Most rows whose scratch fits, in parts of about the same size.
int64_t RowsAtOnce(const FusedTopKParams& params, int64_t num_tiles) {
  int64_t parts = 1;
  const int64_t num_rows = params.partials.num_rows;
  const auto rows = [&] { return (num_rows + parts - 1) / parts; };
  while (rows() > 1 &&
         TopKScratchOf(rows(), params.top_k, num_tiles).size_bytes > params.workspace_bytes) {
    ++parts;
  }
  return rows();
}

bool IsValid(const FusedTopKParams& params) {
  const FusedPartialsParams& partials = params.partials;
  return internal::HasValidOperands(partials) && partials.row_count == nullptr &&
         params.top_k >= 1 && params.top_k <= kTopKMax && params.keys != nullptr &&
         params.workspace != nullptr &&
         reinterpret_cast<uintptr_t>(params.workspace) % kAlignment == 0 &&
         params.workspace_bytes >=
             TopKScratchOf(1, params.top_k, NumShardTiles(partials)).size_bytes &&
         partials.num_rows <= INT32_MAX / params.top_k && partials.tile_max != nullptr;
}

cudaError_t LaunchPart(const FusedTopKParams& params, int64_t row_begin, int64_t rows,
                       cudaStream_t stream) {
  const int64_t num_tiles = NumShardTiles(params.partials);
  const TopKScratch scratch = TopKScratchOf(rows, params.top_k, num_tiles);
  const int64_t pairs = rows * params.top_k;
  const int64_t group_pairs =
      pairs <= kFewPairs * num_tiles ? kTopKGroupPairsMin : kTopKGroupPairsMax;
  uint64_t* const keys = params.keys + row_begin * params.top_k;
  auto* const order = reinterpret_cast<int32_t*>(params.workspace + scratch.order_offset);
  auto* const groups =
      reinterpret_cast<internal::TileGroup*>(params.workspace + scratch.groups_offset);
  auto* const num_groups = reinterpret_cast<int32_t*>(params.workspace + scratch.num_groups_offset);
  auto* const places = reinterpret_cast<int32_t*>(params.workspace + scratch.places_offset);
  auto* const ranks = reinterpret_cast<int32_t*>(params.workspace + scratch.ranks_offset);
  auto* const logits = reinterpret_cast<float*>(params.workspace);
  if (const cudaError_t error =
          internal::LaunchTileGroups({.tile_keys = keys,
                                      .num_pairs = static_cast<int32_t>(pairs),
                                      .num_tiles = static_cast<int32_t>(num_tiles),
                                      .group_pairs = static_cast<int32_t>(group_pairs),
                                      .places = places,
                                      .ranks = ranks,
                                      .order = order,
                                      .groups = groups,
                                      .num_groups = num_groups},
                                     stream);
      error != cudaSuccess) {
    return error;
  }
  if (const cudaError_t error = internal::LaunchTileLogits(
          {.partials = &params.partials,
           .row_begin = row_begin,
           .pairs_per_row = params.top_k,
           .order = order,
           .groups = groups,
           .num_groups = num_groups,
           .num_groups_max = MaxTileGroups(pairs, num_tiles, group_pairs),
           .group_pairs = static_cast<int32_t>(group_pairs),
           .logits = logits},
          stream);
      error != cudaSuccess) {
    return error;
  }
  const int64_t first_id = params.partials.tile_begin * kTileColumns;
  const int64_t columns = std::min(num_tiles * kTileColumns, params.partials.vocab_size - first_id);
  SelectLogitsKernel<<<static_cast<uint32_t>(rows), kTopKThreads, 0, stream>>>(
      logits, ShardColumns{static_cast<int32_t>(first_id), static_cast<int32_t>(columns)},
      params.top_k, keys);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchFusedTopK(const FusedTopKParams& params, cudaStream_t stream) {
  const int64_t num_rows = params.partials.num_rows;
  if (num_rows == 0) return cudaSuccess;
  if (!IsValid(params)) return cudaErrorInvalidValue;
  const int64_t num_tiles = NumShardTiles(params.partials);
  SelectTilesKernel<<<static_cast<uint32_t>(num_rows), kTopKThreads, 0, stream>>>(
      params.partials.tile_max, static_cast<int32_t>(num_tiles), params.top_k, params.keys);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const int64_t rows_at_once = RowsAtOnce(params, num_tiles);
  for (int64_t row = 0; row < num_rows; row += rows_at_once) {
    const int64_t rows = std::min(rows_at_once, num_rows - row);
    if (const cudaError_t error = LaunchPart(params, row, rows, stream); error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace logprobd::kernels
