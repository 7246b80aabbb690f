// MergeTopKKernel: the shards' lists of a row's largest logits -> the row's.
//
// Idea      A key's place among all is its place in its own list plus, for each other list, how
//           many there come before it, which bisection finds: no sorting, no waiting. Among equals
//           (free places) the lower shard's come first, so that places are distinct.
// Work      A block a row, a thread a key.
// Traffic   8 bytes a key; bisections are in shared memory, and end once k keys come before.
// Numerics  Exact.
// Limits    num_shards * k <= 2,048.
// Source    Our own.

#include <cstdint>

#include "kernels/combine/merge_top_k.h"

namespace logprobd::kernels {
namespace {

constexpr int kThreads = 128;

/// Keys of a descending list that come before `key`, those equal to it too where `or_equal`.
__device__ __forceinline__ int NumBefore(const uint64_t* list, int count, uint64_t key,
                                         bool or_equal) {
  int begin = 0;
  while (begin < count) {
    const int middle = begin + (count - begin) / 2;
    if (list[middle] > key || (or_equal && list[middle] == key)) {
      begin = middle + 1;
    } else {
      count = middle;
    }
  }
  return begin;
}

__global__ void __launch_bounds__(kThreads) MergeTopKKernel(const MergeTopKParams params) {
  __shared__ uint64_t lists[kMergeShardsMax * kTopKMax];  // [num_shards, top_k]
  const int64_t row = blockIdx.x;
  const int top_k = params.top_k;
  const int num_keys = params.num_shards * top_k;
  for (int i = static_cast<int>(threadIdx.x); i < num_keys; i += kThreads) {
    const int64_t list = i / top_k * params.num_rows + row;
    lists[i] = params.gathered[list * top_k + i % top_k];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < num_keys; i += kThreads) {
    const int own_shard = i / top_k;
    int place = i % top_k;
    for (int shard = 0; shard < params.num_shards && place < top_k; ++shard) {
      if (shard == own_shard) continue;
      place += NumBefore(lists + shard * top_k, top_k, lists[i], shard < own_shard);
    }
    if (place < top_k) params.keys[row * top_k + place] = lists[i];
  }
}

}  // namespace

cudaError_t LaunchMergeTopK(const MergeTopKParams& params, cudaStream_t stream) {
  if (params.num_rows < 0 || params.num_rows > INT32_MAX || params.top_k < 1 ||
      params.top_k > kTopKMax || params.num_shards < 1 || params.num_shards > kMergeShardsMax) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  if (params.gathered == nullptr || params.keys == nullptr) return cudaErrorInvalidValue;
  MergeTopKKernel<<<static_cast<uint32_t>(params.num_rows), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
