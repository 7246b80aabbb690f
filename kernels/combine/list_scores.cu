// CandidateScoresKernel, TopKScoresKernel: turn the logits of listed ids into log-probabilities.
//
// Idea      Applies the LogprobOf that scores the target, once the row's normalizer is known, so
//           that equal logits get bit-identical log-probabilities in every list.
// Work      One thread per entry.
// Traffic   About 40 bytes per entry.
// Numerics  fp64, rounded once.
// Limits    2^31 - 1 entries per launch.
// Source    Our own.
//
// MergeTopKKernel: merges the shards' lists of a row's largest logits into the row's list.
//
// Idea      The rank of a key among all keys is its index in its own list plus the number of keys
//           of every other list that precede it. A binary search per list finds that number, so
//           that ranking needs neither sorting nor synchronisation. Among equal keys (empty slots)
//           those of the lower shard come first, so ranks are distinct.
// Work      One block per row, one thread per key.
// Traffic   8 bytes per key. The searches run in shared memory and stop once k keys precede the
//           key.
// Numerics  Exact.
// Limits    num_shards * k <= 2,048.
// Source    Our own.

#include <cstdint>

#include "kernels/combine/list_scores.h"

namespace logprobd::kernels {
namespace {

constexpr int kScoreThreads = 256;

__global__ void __launch_bounds__(kScoreThreads)
    CandidateScoresKernel(const CandidateScoresParams params) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kScoreThreads + threadIdx.x;
  if (i >= params.count) return;
  const int32_t row = params.rows[i];
  if (row < params.row_begin || row >= params.row_end) return;
  const int32_t local = row - params.row_begin;
  params.scores[i] =
      LogprobOf(params.scores[i], params.log2_scales[local], params.normalizers[local]);
}

__global__ void __launch_bounds__(kScoreThreads) TopKScoresKernel(const TopKScoresParams params) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kScoreThreads + threadIdx.x;
  if (i >= params.num_rows * params.top_k) return;
  const int64_t row = i / params.top_k;
  const uint64_t key = params.keys[i];
  const RowNormalizer normalizer = params.normalizers[row];
  if (key == 0 || !normalizer.finite) {
    params.ids[i] = -1;
    params.logprobs[i] = NAN;
    return;
  }
  const LogitEntry entry = LogitEntryOf(key);
  params.ids[i] = entry.id;
  params.logprobs[i] = LogprobOf(entry.logit, params.log2_scales[row], normalizer);
}

uint32_t Blocks(int64_t count) {
  return static_cast<uint32_t>((count + kScoreThreads - 1) / kScoreThreads);
}

constexpr int kMergeThreads = 128;

/// Returns the number of keys of a descending list that are larger than `key`, or that are larger
/// than or equal to it if `or_equal`.
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

__global__ void __launch_bounds__(kMergeThreads) MergeTopKKernel(const MergeTopKParams params) {
  __shared__ uint64_t lists[kMergeShardsMax * kTopKMax];  // [num_shards, top_k]
  const int64_t row = blockIdx.x;
  const int top_k = params.top_k;
  const int num_keys = params.num_shards * top_k;
  for (int i = static_cast<int>(threadIdx.x); i < num_keys; i += kMergeThreads) {
    const int64_t list = i / top_k * params.num_rows + row;
    lists[i] = params.gathered[list * top_k + i % top_k];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < num_keys; i += kMergeThreads) {
    const int own_shard = i / top_k;
    int rank = i % top_k;
    for (int shard = 0; shard < params.num_shards && rank < top_k; ++shard) {
      if (shard == own_shard) continue;
      rank += NumBefore(lists + shard * top_k, top_k, lists[i], shard < own_shard);
    }
    if (rank < top_k) params.keys[row * top_k + rank] = lists[i];
  }
}

}  // namespace

cudaError_t LaunchCandidateScores(const CandidateScoresParams& params, cudaStream_t stream) {
  if (params.count < 0 || params.count > INT32_MAX) return cudaErrorInvalidValue;
  if (params.count == 0) return cudaSuccess;
  if (params.rows == nullptr || params.normalizers == nullptr || params.log2_scales == nullptr ||
      params.scores == nullptr) {
    return cudaErrorInvalidValue;
  }
  CandidateScoresKernel<<<Blocks(params.count), kScoreThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchTopKScores(const TopKScoresParams& params, cudaStream_t stream) {
  if (params.num_rows < 0 || params.top_k < 1 || params.top_k > kTopKMax ||
      params.num_rows * params.top_k > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  if (params.keys == nullptr || params.normalizers == nullptr || params.log2_scales == nullptr ||
      params.ids == nullptr || params.logprobs == nullptr) {
    return cudaErrorInvalidValue;
  }
  TopKScoresKernel<<<Blocks(params.num_rows * params.top_k), kScoreThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchMergeTopK(const MergeTopKParams& params, cudaStream_t stream) {
  if (params.num_rows < 0 || params.num_rows > INT32_MAX || params.top_k < 1 ||
      params.top_k > kTopKMax || params.num_shards < 1 || params.num_shards > kMergeShardsMax) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  if (params.gathered == nullptr || params.keys == nullptr) return cudaErrorInvalidValue;
  MergeTopKKernel<<<static_cast<uint32_t>(params.num_rows), kMergeThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
