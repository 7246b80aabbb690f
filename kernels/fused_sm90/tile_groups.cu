// CountPairsKernel, CutGroupsKernel, OrderPairsKernel: sort (row, tile) pairs by tile and cut each
// tile's pairs into groups.
//
// Idea      A counting sort: a pair's rank among its tile's is what the counter held before it.
// Work      A thread a pair; the prefix sums over the tiles are one block's.
// Traffic   8 bytes a pair, twice, and 12 more.
// Limits    2^31 pairs.
// Source    Our own.

#include "kernels/common/logit_key.h"
#include "kernels/fused_sm90/tile_groups.h"

namespace logprobd::kernels::internal {
namespace {

constexpr int kThreads = 256;
constexpr int kCutThreads = 1024;

__device__ __forceinline__ int32_t PairOfThread() {
  return static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
}

__global__ void __launch_bounds__(kThreads) CountPairsKernel(const TileGroupsParams params) {
  const int32_t pair = PairOfThread();
  if (pair >= params.num_pairs) return;
  const uint64_t key = params.tile_keys[pair];
  if (key != 0) params.ranks[pair] = atomicAdd(params.places + LogitEntryOf(key).id, 1);
}

/// Sum of `value` over the threads before this one. All threads call it.
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

/// Turns the tiles' counts into their first places. A thread takes a run of tiles.
__global__ void __launch_bounds__(kCutThreads) CutGroupsKernel(const TileGroupsParams params) {
  const int32_t run = (params.num_tiles + kCutThreads - 1) / kCutThreads;
  const int32_t tile_begin = min(static_cast<int32_t>(threadIdx.x) * run, params.num_tiles);
  const int32_t tile_end = min(tile_begin + run, params.num_tiles);
  int2 own = make_int2(0, 0);  // pairs, groups
  for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
    const int32_t count = params.places[tile];
    own.x += count;
    own.y += (count + params.group_pairs - 1) / params.group_pairs;
  }
  int2 next = SumBefore(own);
  if (threadIdx.x == kCutThreads - 1) *params.num_groups = next.y + own.y;
  for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
    const int32_t count = params.places[tile];
    for (int32_t done = 0; done < count; done += params.group_pairs) {
      params.groups[next.y++] = {tile, next.x + done, min(count - done, params.group_pairs)};
    }
    params.places[tile] = next.x;
    next.x += count;
  }
}

__global__ void __launch_bounds__(kThreads) OrderPairsKernel(const TileGroupsParams params) {
  const int32_t pair = PairOfThread();
  if (pair >= params.num_pairs) return;
  const uint64_t key = params.tile_keys[pair];
  if (key != 0) params.order[params.places[LogitEntryOf(key).id] + params.ranks[pair]] = pair;
}

}  // namespace

cudaError_t LaunchTileGroups(const TileGroupsParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<uint32_t>((params.num_pairs + kThreads - 1) / kThreads);
  if (const cudaError_t error = cudaMemsetAsync(
          params.places, 0, static_cast<size_t>(params.num_tiles) * sizeof(int32_t), stream);
      error != cudaSuccess) {
    return error;
  }
  CountPairsKernel<<<blocks, kThreads, 0, stream>>>(params);
  CutGroupsKernel<<<1, kCutThreads, 0, stream>>>(params);
  OrderPairsKernel<<<blocks, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels::internal
