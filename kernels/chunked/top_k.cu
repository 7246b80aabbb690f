// TopKKernel: merges a chunk of logits into each row's running best k.
//
// Idea      A key holds logit and id, so that keys are distinct and their order is total: the set of
//           the k largest does not depend on the order of anything. Keys above the current k-th are
//           appended to a list in shared memory; when it is full, or the chunk ends, list and best
//           are sorted together and the first k stay. After the first columns few keys pass.
// Work      A block a row; four columns a thread and step.
// Traffic   4 bytes a logit, 16 k bytes a row and chunk.
// Numerics  Exact.
// Limits    k <= 128. Rising logits make every step sort: slower, same result.
// Source    Our own; the sorting network is Batcher's bitonic one.

#include <cstdint>

#include "kernels/chunked/logit_chunk.cuh"
#include "kernels/chunked/top_k.h"
#include "kernels/common/logit_key.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 256;
constexpr int kStepColumns = kBlockThreads * 4;
constexpr int kCapacity = 2048;  // best and pending keys

static_assert(kCapacity >= kTopKMax + kStepColumns);

/// Sorts keys[0, count) descending; count is a power of two.
__device__ void SortDescending(uint64_t* keys, int count) {
  for (int size = 2; size <= count; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int i = static_cast<int>(threadIdx.x); i < count / 2; i += kBlockThreads) {
        const int low = i / stride * stride * 2 + i % stride;
        const int high = low + stride;
        const bool descending = (low & size) == 0;
        const uint64_t a = keys[low];
        const uint64_t b = keys[high];
        if ((a < b) == descending) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

template <bool kTransform>
__global__ void __launch_bounds__(kBlockThreads)
    TopKKernel(const TopKParams params, const int64_t valid_columns) {
  __shared__ uint64_t keys[kCapacity];  // [0, top_k) best so far, then the pending
  __shared__ int num_keys;
  const int64_t row = blockIdx.x;
  const int top_k = params.top_k;
  uint64_t* const best = params.keys + row * top_k;
  for (int i = static_cast<int>(threadIdx.x); i < top_k; i += kBlockThreads) keys[i] = best[i];
  if (threadIdx.x == 0) num_keys = top_k;
  __syncthreads();
  uint64_t threshold = keys[top_k - 1];
  bool has_changed = false;

  const auto merge = [&](int count) {
    int padded = 2;
    while (padded < count) padded *= 2;
    for (int i = count + static_cast<int>(threadIdx.x); i < padded; i += kBlockThreads) {
      keys[i] = 0;
    }
    __syncthreads();
    SortDescending(keys, padded);
    threshold = keys[top_k - 1];
    has_changed = true;
    if (threadIdx.x == 0) num_keys = top_k;
    __syncthreads();
  };

  const auto first_id = static_cast<int32_t>(params.chunk.tile_begin * kTileColumns);
  for (int64_t begin = 0; begin < valid_columns; begin += kStepColumns) {
    uint64_t fresh[4] = {0, 0, 0, 0};
    bool passes = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t column = begin + i * kBlockThreads + threadIdx.x;
      if (column < valid_columns) {
        fresh[i] = LogitKey(LogitAt<kTransform>(params.chunk, row, column),
                            first_id + static_cast<int32_t>(column));
        passes = passes || fresh[i] > threshold;
      }
    }
    if (__syncthreads_or(passes ? 1 : 0) == 0) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (fresh[i] > threshold) keys[atomicAdd(&num_keys, 1)] = fresh[i];
    }
    __syncthreads();
    const int count = num_keys;
    __syncthreads();  // before anyone changes it
    if (count > kCapacity - kStepColumns) merge(count);
  }
  const int count = num_keys;
  __syncthreads();
  if (count > top_k) merge(count);
  if (!has_changed) return;
  for (int i = static_cast<int>(threadIdx.x); i < top_k; i += kBlockThreads) best[i] = keys[i];
}

}  // namespace

cudaError_t LaunchTopK(const TopKParams& params, cudaStream_t stream) {
  if (!IsValid(params.chunk) || params.top_k < 1 || params.top_k > kTopKMax ||
      params.keys == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (params.chunk.num_rows == 0) return cudaSuccess;
  const auto blocks = static_cast<uint32_t>(params.chunk.num_rows);
  const auto kernel = HasTransform(params.chunk) ? TopKKernel<true> : TopKKernel<false>;
  kernel<<<blocks, kBlockThreads, 0, stream>>>(params, ValidColumns(params.chunk));
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
