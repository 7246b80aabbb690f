// CompactRowsKernel: finds the rows that need computing, given targets and upstream gradients.
//
// Idea      One launch instead of a dozen: for few rows, launches dominate the time.
// Work      One block, 4,096 rows per step with running counts; a thread processes four consecutive
//           rows.
// Traffic   Reads 8 to 24 bytes and writes 8 or 16 bytes per row.
// Numerics  None.
// Limits    2^31 - 1 rows; beyond a million a scan over many blocks would be faster.
// Source    Our own.

#include <cstdint>

#include "kernels/common/overlapped_launch.cuh"
#include "kernels/row_ops/compact_rows.h"

namespace logprobd::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarpThreads = 32;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kThreadRows = 4;
constexpr unsigned kFullWarp = 0xFFFFFFFFU;

/// Returns true when at least one gradient of the row is not 0, or when no gradients are given.
__device__ bool HasGradient(const CompactRowsParams& params, int64_t row) {
  bool has_values = false;
  bool has_gradient = false;
#pragma unroll
  for (int i = 0; i < kRowGradients; ++i) {
    const RowValues& gradients = params.gradients[i];
    if (gradients.values == nullptr) continue;
    has_values = true;
    has_gradient = has_gradient || gradients.values[row * gradients.stride] != 0.0F;  // also NaN
  }
  return has_gradient || !has_values;
}

/// Packs the numbers of compacted and valid rows of a step into one integer; each fits in 16 bits.
__device__ int32_t Packed(int32_t compacted, int32_t valid) { return compacted | valid << 16; }
__device__ int32_t CompactedOf(int32_t packed) { return packed & 0xFFFF; }
__device__ int32_t ValidOf(int32_t packed) { return packed >> 16; }
static_assert(kThreads * kThreadRows < 1 << 15);

/// Returns the sum of `count` over the threads before this one; `total` becomes the sum over all
/// threads. All threads must call it.
__device__ int32_t CountBefore(int32_t count, int32_t* warp_counts, int32_t& total) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  int32_t inclusive_sum = count;
#pragma unroll
  for (int distance = 1; distance < kWarpThreads; distance *= 2) {
    const int32_t other = __shfl_up_sync(kFullWarp, inclusive_sum, distance);
    if (lane >= distance) inclusive_sum += other;
  }
  if (lane == kWarpThreads - 1) warp_counts[warp] = inclusive_sum;
  __syncthreads();
  int32_t before = inclusive_sum - count;
  total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += warp_counts[i];
    total += warp_counts[i];
  }
  __syncthreads();
  return before;
}

/// Adds every thread's `count` to `total` in shared memory. All threads must call it.
__device__ void AddOverBlock(unsigned long long count, unsigned long long* total) {
#pragma unroll
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    count += __shfl_xor_sync(kFullWarp, count, distance);
  }
  if (threadIdx.x % kWarpThreads == 0) atomicAdd(total, count);
}

/// Combines every thread's `least` and `greatest` into two values in shared memory. All threads
/// must call it.
__device__ void BoundOverBlock(long long least, long long greatest, long long* least_of_all,
                               long long* greatest_of_all) {
#pragma unroll
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    least = min(least, __shfl_xor_sync(kFullWarp, least, distance));
    greatest = max(greatest, __shfl_xor_sync(kFullWarp, greatest, distance));
  }
  if (threadIdx.x % kWarpThreads != 0) return;
  atomicMin(least_of_all, least);
  atomicMax(greatest_of_all, greatest);
}

__global__ void __launch_bounds__(kThreads) CompactRowsKernel(const CompactRowsParams params) {
  __shared__ int32_t warp_counts[kWarps];
  __shared__ unsigned long long first_out_of_vocab;
  __shared__ unsigned long long num_out_of_vocab;
  __shared__ unsigned long long target_checksum;
  __shared__ long long min_target;
  __shared__ long long max_target;
  StartNextKernel();
  WaitForPreviousKernel();
  if (threadIdx.x == 0) {
    first_out_of_vocab = ~0ULL;
    num_out_of_vocab = 0;
    target_checksum = 0;
    min_target = INT64_MAX;
    max_target = INT64_MIN;
  }
  __syncthreads();
  unsigned long long checksum = 0;
  long long least = INT64_MAX;
  long long greatest = INT64_MIN;
  int64_t num_compacted = 0;
  int64_t num_valid = 0;
  for (int64_t begin = 0; begin < params.num_rows; begin += kThreads * kThreadRows) {
    const int64_t first = begin + static_cast<int64_t>(threadIdx.x) * kThreadRows;
    bool is_compacted[kThreadRows];
    bool is_valid[kThreadRows];
    int32_t num_thread_compacted = 0;
    int32_t num_thread_valid = 0;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int64_t row = first + i;
      is_compacted[i] = is_valid[i] = false;
      if (row >= params.num_rows) continue;
      const int64_t target = params.targets[row];
      checksum += static_cast<unsigned long long>(target) * (row + 1);
      is_valid[i] = target != params.ignore_index;
      num_thread_valid += is_valid[i] ? 1 : 0;
      is_compacted[i] = is_valid[i] && HasGradient(params, row);
      num_thread_compacted += is_compacted[i] ? 1 : 0;
      if (is_compacted[i]) {
        least = min(least, static_cast<long long>(target));
        greatest = max(greatest, static_cast<long long>(target));
      }
      if (is_compacted[i] && (target < params.first_id || target >= params.end_id)) {
        atomicMin(&first_out_of_vocab, static_cast<unsigned long long>(row));
        atomicAdd(&num_out_of_vocab, 1ULL);
      }
    }
    int32_t total = 0;
    const int32_t before =
        CountBefore(Packed(num_thread_compacted, num_thread_valid), warp_counts, total);
    int64_t compacted_index = num_compacted + CompactedOf(before);
    int64_t valid_index = num_valid + ValidOf(before);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      if (is_compacted[i]) {
        if (params.valid_indices != nullptr) params.valid_indices[compacted_index] = valid_index;
        params.row_indices[compacted_index++] = first + i;
      }
      if (is_valid[i]) ++valid_index;
    }
    num_compacted += CompactedOf(total);
    num_valid += ValidOf(total);
  }
  for (int64_t i = num_compacted + threadIdx.x; i < params.num_rows; i += kThreads) {
    params.row_indices[i] = 0;
    if (params.valid_indices != nullptr) params.valid_indices[i] = 0;
  }
  AddOverBlock(checksum, &target_checksum);
  BoundOverBlock(least, greatest, &min_target, &max_target);
  __syncthreads();
  if (threadIdx.x == 0) {
    if (params.num_compacted != nullptr) *params.num_compacted = num_compacted;
    *params.result = {num_compacted,
                      num_valid,
                      static_cast<int64_t>(first_out_of_vocab),
                      static_cast<int64_t>(num_out_of_vocab),
                      min_target,
                      max_target,
                      static_cast<int64_t>(target_checksum)};
  }
}

}  // namespace

cudaError_t LaunchCompactRows(const CompactRowsParams& params, cudaStream_t stream) {
  if (params.num_rows < 0 || params.num_rows > INT32_MAX || params.result == nullptr ||
      (params.num_rows > 0 && (params.targets == nullptr || params.row_indices == nullptr))) {
    return cudaErrorInvalidValue;
  }
  return LaunchOverlapped(CompactRowsKernel, 1, kThreads, params, stream);
}

}  // namespace logprobd::kernels
