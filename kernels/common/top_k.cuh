#pragma once

// FindTopK: one block finds the k largest keys of a row. Kernels with different sources of keys
// share this function, so that they compute the same lists.
//
// Idea      A key contains logit and id, so keys are distinct and totally ordered: the k largest do
//           not depend on the order in which keys are read. Keys above the current k-th largest are
//           appended to a list in shared memory. When the list is full, or the columns end, the
//           list and the current best keys are sorted together and the first k remain. If many keys
//           exceed the threshold at once, a value that at least k of them reach is first found by
//           bisection, which is faster than sorting all of them.
// Work      One block of kTopKThreads per row, four columns per thread and step.
// Traffic   Reads each value once; `best` is read and written once.
// Numerics  Exact.
// Limits    k <= kTopKMax. With ascending logits every step sorts: slower, with the same result.
// Source    Our own; the sorting network is Batcher's bitonic one.

#include <cstdint>

#include "kernels/common/logit_key.h"

namespace logprobd::kernels {

inline constexpr int kTopKThreads = 256;
inline constexpr int kTopKStepColumns = kTopKThreads * 4;
inline constexpr int kTopKCapacity = 2048;  // best keys and pending keys
/// A bisection takes place if more threads than this have a key above the threshold.
inline constexpr int kManyPassing = 64;

static_assert(kTopKCapacity >= kTopKMax + kTopKStepColumns);

/// Sorts keys[0, count) in descending order with `kThreads` threads that synchronise with `wait`.
/// `count` is a power of two.
template <int kThreads, class Wait>
__device__ __forceinline__ void SortDescending(uint64_t* keys, int count, const Wait& wait) {
  for (int size = 2; size <= count; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int i = static_cast<int>(threadIdx.x); i < count / 2; i += kThreads) {
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
      wait();
    }
  }
}

/// Sorts keys[0, count) in descending order with all threads of a block. One warp alone sorts few
/// keys, without block-wide synchronisation.
__device__ inline void SortKeysDescending(uint64_t* keys, int count) {
  constexpr int kWarpKeys = 64;
  if (count > kWarpKeys) {
    SortDescending<kTopKThreads>(keys, count, [] { __syncthreads(); });
    return;
  }
  if (threadIdx.x < 32) SortDescending<32>(keys, count, [] { __syncwarp(); });
  __syncthreads();
}

/// Bisects for a large value that the best keys of at least `top_k` threads reach, and returns the
/// largest key below that value, or 0 if fewer threads have a key. `own` is this thread's best key,
/// or 0. All threads must call it.
__device__ inline uint64_t FloorOf(uint64_t own, int top_k) {
  const auto value = static_cast<uint32_t>(own >> 32);
  uint32_t low = 1;
  uint32_t high = 0xFFFFFFFFU;
  int reach_low = __syncthreads_count(value >= low ? 1 : 0);
  if (reach_low < top_k) return 0;
  while (reach_low > top_k + top_k / 4 + 8 && high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const int reach = __syncthreads_count(value >= middle ? 1 : 0);
    if (reach < top_k) {
      high = middle;
    } else {
      low = middle;
      reach_low = reach;
    }
  }
  return (static_cast<uint64_t>(low) << 32) - 1;
}

/// Writes the `top_k` largest keys source.Key(column, source.Load(column)), column in
/// [0, num_columns), to best[0, top_k) in descending order. A key of 0 means that there is no key;
/// missing keys are written as 0. If `from_best` is true, the keys in `best` take part. All threads
/// of a block of kTopKThreads must call it.
template <class Source>
__device__ void FindTopK(const Source& source, int32_t num_columns, int top_k, bool from_best,
                         uint64_t* best) {
  __shared__ uint64_t keys[kTopKCapacity];  // [0, top_k): best so far; then pending keys
  __shared__ int num_keys;
  const int num_initial = from_best ? top_k : 0;
  for (int i = static_cast<int>(threadIdx.x); i < num_initial; i += kTopKThreads) keys[i] = best[i];
  if (threadIdx.x == 0) num_keys = num_initial;
  __syncthreads();
  uint64_t threshold = from_best ? keys[top_k - 1] : 0;
  bool has_changed = !from_best;

  const auto merge = [&](int count) {
    int padded = 2;
    while (padded < count || padded < top_k) padded *= 2;
    for (int i = count + static_cast<int>(threadIdx.x); i < padded; i += kTopKThreads) keys[i] = 0;
    __syncthreads();
    SortKeysDescending(keys, padded);
    if (keys[top_k - 1] > threshold) threshold = keys[top_k - 1];
    has_changed = true;
    if (threadIdx.x == 0) num_keys = top_k;
    __syncthreads();
  };

  decltype(source.Load(0)) values[4] = {};
  const auto load = [&](int32_t begin) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t column = begin + i * kTopKThreads + static_cast<int32_t>(threadIdx.x);
      if (column < num_columns) values[i] = source.Load(column);
    }
  };
  load(0);
  for (int32_t begin = 0; begin < num_columns; begin += kTopKStepColumns) {
    uint64_t fresh[4] = {0, 0, 0, 0};
    uint64_t own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t column = begin + i * kTopKThreads + static_cast<int32_t>(threadIdx.x);
      if (column < num_columns) fresh[i] = source.Key(column, values[i]);
      if (fresh[i] > threshold && fresh[i] > own) own = fresh[i];
    }
    load(begin + kTopKStepColumns);  // in flight while the current values are processed
    const int num_passing = __syncthreads_count(own != 0 ? 1 : 0);
    if (num_passing == 0) continue;
    if (num_passing > kManyPassing) {
      const uint64_t floor = FloorOf(own, top_k);
      if (floor > threshold) threshold = floor;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (fresh[i] > threshold) keys[atomicAdd(&num_keys, 1)] = fresh[i];
    }
    __syncthreads();
    const int count = num_keys;
    __syncthreads();  // all threads have read num_keys before it changes
    if (count > kTopKCapacity - kTopKStepColumns) merge(count);
  }
  const int count = num_keys;
  __syncthreads();
  if (count > num_initial || !from_best) merge(count);
  if (!has_changed) return;
  for (int i = static_cast<int>(threadIdx.x); i < top_k; i += kTopKThreads) best[i] = keys[i];
}

}  // namespace logprobd::kernels
