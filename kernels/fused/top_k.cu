// Finds the k largest logits of each row in the k tiles of the row that have the largest maxima.
//
// SelectTilesKernel, SelectCandidatesKernel: select k tiles of each row, then k logits in these
// tiles.
//
// Idea      At least k logits, the maxima of the k tiles with the largest maxima, are as large as any
//           logit outside these tiles. The logits of the k tiles are recomputed (tile_logits.cu,
//           mma_tile_logits.cu), which lists the few that can be among the k largest
//           (tile_candidates.cuh). The k largest of the list remain.
// Work      One block per row.
// Traffic   Reads 4 bytes per tile, then 4 k (k + 1) bytes per row.
// Numerics  Exact.
// Limits    k <= kTopKMax.
// Source    Our own.
//
// CountPairsKernel, CutGroupsKernel, OrderPairsKernel: sort (row, tile) pairs by tile and cut the
// pairs of each tile into groups.
//
// Idea      Counting sort: the rank of a pair within its tile is the value of the tile's counter
//           before the pair increments it.
// Work      One thread per pair; one block computes the prefix sums over the tiles.
// Traffic   About 28 bytes per pair.
// Numerics  None. The ranks depend on the order of the atomics, but no result depends on the ranks.
// Limits    2^31 - 1 pairs.
// Source    Our own.

#include <algorithm>

#include "kernels/common/overlapped_launch.cuh"
#include "kernels/common/top_k.cuh"
#include "kernels/fused/checks.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/sm80/mma_launch.h"
#include "kernels/fused/sm90/wgmma_launch.h"
#include "kernels/fused/tile_logits.h"
#include "kernels/fused/top_k.h"
#include "kernels/fused/top_k_scratch.h"

namespace logprobd::kernels {
namespace {

using internal::TileGroup;

constexpr int64_t kAlignment = 256;

/// The maxima of a row's tiles, as the input of FindTopK. Tile indices start at the shard's first
/// tile.
struct RowTiles {
  const float* maxima;

  __device__ __forceinline__ float Load(int32_t tile) const { return maxima[tile]; }
  __device__ __forceinline__ uint64_t Key(int32_t tile, float maximum) const {
    return LogitKey(maximum, tile);
  }
};

struct SelectTilesParams {
  const float* tile_max;  ///< [rows, num_tiles]
  int32_t num_tiles;
  int32_t top_k;
  uint64_t* keys;  ///< [rows, top_k], written: LogitKeys whose ids are tiles; 0 is an empty slot.
};

__global__ void __launch_bounds__(kTopKThreads) SelectTilesKernel(const SelectTilesParams params) {
  WaitForPreviousKernel();
  const int64_t row = blockIdx.x;
  FindTopK(RowTiles{params.tile_max + row * params.num_tiles}, params.num_tiles, params.top_k,
           /*from_best=*/false, params.keys + row * params.top_k);
}

/// The candidates of a row, as the input of FindTopK.
struct RowCandidates {
  const uint64_t* candidates;

  __device__ __forceinline__ uint64_t Load(int32_t index) const { return candidates[index]; }
  __device__ __forceinline__ uint64_t Key(int32_t /*index*/, uint64_t candidate) const {
    return candidate;
  }
};

struct SelectCandidatesParams {
  const uint64_t* candidates;  ///< [rows, CandidatesPerRow(top_k)]
  int32_t num_tiles;
  int32_t top_k;
  uint64_t* keys;  ///< [rows, top_k], written.
};

__global__ void __launch_bounds__(kTopKThreads)
    SelectCandidatesKernel(const SelectCandidatesParams params) {
  WaitForPreviousKernel();
  const int64_t row = blockIdx.x;
  // If the row has fewer than top_k tiles, the entries of the empty slots were not written.
  const int64_t count = CandidatesBefore(min(params.num_tiles, params.top_k), params.top_k);
  FindTopK(RowCandidates{params.candidates + row * CandidatesPerRow(params.top_k)},
           static_cast<int32_t>(count), params.top_k, /*from_best=*/false,
           params.keys + row * params.top_k);
}

/// Inputs and outputs of the sort of (row, tile) pairs by tile. Tile indices start at the shard's
/// first tile.
struct TileGroupsParams {
  const uint64_t* tile_keys;  ///< [num_pairs], LogitKeys whose ids are tiles; 0 is an empty slot.
  int32_t num_pairs;          ///< >= 1.
  int32_t num_tiles;          ///< Tiles of the shard.
  int32_t group_pairs;        ///< Maximum number of pairs in a group.
  int32_t* starts;            ///< [num_tiles], scratch.
  int32_t* ranks;             ///< [num_pairs], scratch.
  int32_t* order;             ///< [num_pairs], written: pairs sorted by tile.
  TileGroup* groups;          ///< [MaxTileGroups], written.
  int32_t* num_groups;        ///< One number, written.
};

constexpr int kPairThreads = 256;
constexpr int kCutThreads = 1024;

__device__ __forceinline__ int32_t PairOfThread() {
  return static_cast<int32_t>(blockIdx.x * kPairThreads + threadIdx.x);
}

__global__ void __launch_bounds__(kPairThreads) CountPairsKernel(const TileGroupsParams params) {
  const int32_t pair = PairOfThread();
  if (pair >= params.num_pairs) return;
  const uint64_t key = params.tile_keys[pair];
  if (key != 0) params.ranks[pair] = atomicAdd(params.starts + LogitEntryOf(key).id, 1);
}

/// Returns the sum of `value` over the threads before this one. All threads must call it.
__device__ int2 SumBefore(int2 value) {
  __shared__ int2 warp_sums[kCutThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int2 sum = value;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int x = __shfl_up_sync(0xFFFFFFFFU, sum.x, offset);
    const int y = __shfl_up_sync(0xFFFFFFFFU, sum.y, offset);
    if (lane >= offset) sum = make_int2(sum.x + x, sum.y + y);
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int2 before = make_int2(sum.x - value.x, sum.y - value.y);
  for (int i = 0; i < warp; ++i) {
    before = make_int2(before.x + warp_sums[i].x, before.y + warp_sums[i].y);
  }
  return before;
}

/// Turns the number of pairs of each tile into the tile's first index in `order`, and cuts the
/// pairs into groups. Each thread processes consecutive tiles.
__global__ void __launch_bounds__(kCutThreads) CutGroupsKernel(const TileGroupsParams params) {
  WaitForPreviousKernel();
  const int32_t thread_tiles = (params.num_tiles + kCutThreads - 1) / kCutThreads;
  const int32_t tile_begin =
      min(static_cast<int32_t>(threadIdx.x) * thread_tiles, params.num_tiles);
  const int32_t tile_end = min(tile_begin + thread_tiles, params.num_tiles);
  int2 own = make_int2(0, 0);  // pairs, groups
  for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
    const int32_t count = params.starts[tile];
    own.x += count;
    own.y += (count + params.group_pairs - 1) / params.group_pairs;
  }
  int2 next = SumBefore(own);
  if (threadIdx.x == kCutThreads - 1) *params.num_groups = next.y + own.y;
  for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
    const int32_t count = params.starts[tile];
    for (int32_t done = 0; done < count; done += params.group_pairs) {
      params.groups[next.y++] = {tile, next.x + done, min(count - done, params.group_pairs)};
    }
    params.starts[tile] = next.x;
    next.x += count;
  }
}

__global__ void __launch_bounds__(kPairThreads) OrderPairsKernel(const TileGroupsParams params) {
  WaitForPreviousKernel();
  const int32_t pair = PairOfThread();
  if (pair >= params.num_pairs) return;
  const uint64_t key = params.tile_keys[pair];
  if (key != 0) params.order[params.starts[LogitEntryOf(key).id] + params.ranks[pair]] = pair;
}

/// Enqueues the sort of (row, tile) pairs by tile. The order within a tile is unspecified.
cudaError_t LaunchTileGroups(const TileGroupsParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<uint32_t>((params.num_pairs + kPairThreads - 1) / kPairThreads);
  if (const cudaError_t error = cudaMemsetAsync(
          params.starts, 0, static_cast<size_t>(params.num_tiles) * sizeof(int32_t), stream);
      error != cudaSuccess) {
    return error;
  }
  CountPairsKernel<<<blocks, kPairThreads, 0, stream>>>(params);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  if (const cudaError_t error = LaunchOverlapped(CutGroupsKernel, 1, kCutThreads, params, stream);
      error != cudaSuccess) {
    return error;
  }
  return LaunchOverlapped(OrderPairsKernel, blocks, kPairThreads, params, stream);
}

/// Returns the smallest group size that holds all pairs of most tiles, if the pairs spread evenly.
int64_t GroupPairs(int64_t pairs, int64_t num_tiles) {
  for (const int64_t size : kTopKGroupPairs) {
    if (pairs <= size * 7 / 8 * num_tiles) return size;
  }
  return kTopKGroupPairs.back();
}

int64_t NumShardTiles(const FusedPartialsParams& params) {
  return params.tile_end - params.tile_begin;
}

/// Returns how many rows are searched at once: the rows are cut into the fewest parts of about
/// equal size whose scratch fits the workspace.
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

/// Enqueues the search of some rows, whose selected tiles are in `keys`.
cudaError_t LaunchPart(const FusedTopKParams& params, FusedArch arch, int64_t row_begin,
                       int64_t rows, cudaStream_t stream) {
  const int64_t num_tiles = NumShardTiles(params.partials);
  const TopKScratch scratch = TopKScratchOf(rows, params.top_k, num_tiles);
  const int64_t pairs = rows * params.top_k;
  const int64_t group_pairs = GroupPairs(pairs, num_tiles);
  uint64_t* const keys = params.keys + row_begin * params.top_k;
  auto* const order = reinterpret_cast<int32_t*>(params.workspace + scratch.order_offset);
  auto* const groups = reinterpret_cast<TileGroup*>(params.workspace + scratch.groups_offset);
  auto* const num_groups = reinterpret_cast<int32_t*>(params.workspace + scratch.num_groups_offset);
  auto* const starts = reinterpret_cast<int32_t*>(params.workspace + scratch.starts_offset);
  auto* const ranks = reinterpret_cast<int32_t*>(params.workspace + scratch.ranks_offset);
  auto* const candidates = reinterpret_cast<uint64_t*>(params.workspace);
  if (const cudaError_t error = LaunchTileGroups({.tile_keys = keys,
                                                  .num_pairs = static_cast<int32_t>(pairs),
                                                  .num_tiles = static_cast<int32_t>(num_tiles),
                                                  .group_pairs = static_cast<int32_t>(group_pairs),
                                                  .starts = starts,
                                                  .ranks = ranks,
                                                  .order = order,
                                                  .groups = groups,
                                                  .num_groups = num_groups},
                                                 stream);
      error != cudaSuccess) {
    return error;
  }
  const auto launch_tile_logits =
      arch == FusedArch::kSm90 ? internal::LaunchWgmmaTileLogits : internal::LaunchMmaTileLogits;
  if (const cudaError_t error =
          launch_tile_logits({.partials = &params.partials,
                              .row_begin = row_begin,
                              .top_k = params.top_k,
                              .tile_keys = keys,
                              .order = order,
                              .groups = groups,
                              .num_groups = num_groups,
                              .num_groups_max = MaxTileGroups(pairs, num_tiles, group_pairs),
                              .group_pairs = static_cast<int32_t>(group_pairs),
                              .candidates = candidates},
                             stream);
      error != cudaSuccess) {
    return error;
  }
  return LaunchOverlapped(SelectCandidatesKernel, static_cast<unsigned>(rows), kTopKThreads,
                          {.candidates = candidates,
                           .num_tiles = static_cast<int32_t>(num_tiles),
                           .top_k = params.top_k,
                           .keys = keys},
                          stream);
}

}  // namespace

cudaError_t LaunchFusedTopK(const FusedTopKParams& params, cudaStream_t stream) {
  return LaunchFusedTopKAs(params, FusedArchOfCurrentDevice(), stream);
}

cudaError_t LaunchFusedTopKAs(const FusedTopKParams& params, FusedArch arch, cudaStream_t stream) {
  const int64_t num_rows = params.partials.num_rows;
  if (num_rows == 0) return cudaSuccess;
  if (!IsValid(params)) return cudaErrorInvalidValue;
  if (arch == FusedArch::kNone) return cudaErrorNotSupported;
  const int64_t num_tiles = NumShardTiles(params.partials);
  if (const cudaError_t error =
          LaunchOverlapped(SelectTilesKernel, static_cast<unsigned>(num_rows), kTopKThreads,
                           {.tile_max = params.partials.tile_max,
                            .num_tiles = static_cast<int32_t>(num_tiles),
                            .top_k = params.top_k,
                            .keys = params.keys},
                           stream);
      error != cudaSuccess) {
    return error;
  }
  const int64_t rows_at_once = RowsAtOnce(params, num_tiles);
  for (int64_t row = 0; row < num_rows; row += rows_at_once) {
    const int64_t rows = std::min(rows_at_once, num_rows - row);
    if (const cudaError_t error = LaunchPart(params, arch, row, rows, stream);
        error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace logprobd::kernels
