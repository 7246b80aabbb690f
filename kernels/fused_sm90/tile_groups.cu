// TileGroupsKernel: sorts (row, tile) pairs by tile and cuts each tile's pairs into groups.
//
// Idea      A counting sort: the tiles' counts lie in shared memory.
// Work      One block; a thread takes every 1,024th pair, and a run of tiles for the prefix sums.
// Traffic   8 bytes a pair, twice, and 4 out.
// Limits    2^20 columns: 5,462 counts.
// Source    Our own.

#include "kernels/fused_sm90/tile_groups.h"

#include "kernels/common/logit_key.h"

namespace logprobd::kernels::internal {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kUnroll = 8;  // loads in flight: there is one block to hide their latency

/// Calls visit(pair, tile) for this thread's pairs that have a tile.
template <class Visit>
__device__ __forceinline__ void ForEachPair(const TileGroupsParams& params, const Visit& visit) {
  for (int32_t first = 0; first < params.num_pairs; first += kThreads * kUnroll) {
    uint64_t keys[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int32_t pair = first + i * kThreads + static_cast<int32_t>(threadIdx.x);
      keys[i] = pair < params.num_pairs ? params.tile_keys[pair] : 0;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (keys[i] == 0) continue;
      visit(first + i * kThreads + static_cast<int32_t>(threadIdx.x), LogitEntryOf(keys[i]).id);
    }
  }
}

/// Sum of `value` over the threads before this one. All threads call it.
__device__ int2 ExclusiveSum(int2 value) {
  __shared__ int2 warp_sums[kWarps];
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

__global__ void __launch_bounds__(kThreads) TileGroupsKernel(const TileGroupsParams params) {
  extern __shared__ int32_t places[];  // [num_tiles]: counts, then the next place of each
  for (int32_t tile = static_cast<int32_t>(threadIdx.x); tile < params.num_tiles;
       tile += kThreads) {
    places[tile] = 0;
  }
  __syncthreads();
  ForEachPair(params, [&](int32_t, int32_t tile) { atomicAdd(&places[tile], 1); });
  __syncthreads();

  const int32_t run = (params.num_tiles + kThreads - 1) / kThreads;
  const int32_t tile_begin = min(static_cast<int32_t>(threadIdx.x) * run, params.num_tiles);
  const int32_t tile_end = min(tile_begin + run, params.num_tiles);
  int2 own = make_int2(0, 0);  // pairs, groups
  for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
    own.x += places[tile];
    own.y += (places[tile] + params.group_pairs - 1) / params.group_pairs;
  }
  int2 next = ExclusiveSum(own);
  if (threadIdx.x == kThreads - 1) *params.num_groups = next.y + own.y;
  for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
    const int32_t count = places[tile];
    for (int32_t done = 0; done < count; done += params.group_pairs) {
      params.groups[next.y++] = {tile, next.x + done, min(count - done, params.group_pairs)};
    }
    places[tile] = next.x;
    next.x += count;
  }
  __syncthreads();
  ForEachPair(params, [&](int32_t pair, int32_t tile) {
    params.order[atomicAdd(&places[tile], 1)] = pair;
  });
}

}  // namespace

cudaError_t LaunchTileGroups(const TileGroupsParams& params, cudaStream_t stream) {
  const size_t bytes = static_cast<size_t>(params.num_tiles) * sizeof(int32_t);
  TileGroupsKernel<<<1, kThreads, bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels::internal
