// RowOperandsKernel: turns a trainer's targets and temperatures into inputs of the fused kernels.
//
// Idea      One launch instead of a dozen: for few rows, launches dominate the time.
// Work      One thread per row.
// Traffic   About 40 bytes per row.
// Numerics  log2_scale is computed in fp64 and rounded once.
// Limits    2^31 - 1 rows.
// Source    Our own.
//
// RowGradientsKernel: turns upstream gradients and scores of a row into its gradient constants.
//
// Idea      See RowOperandsKernel.
// Work      One thread per row.
// Traffic   About 80 bytes per row.
// Numerics  fp64, rounded once (kernels/common/row_gradient.h).
// Limits    2^31 - 1 rows.
// Source    Our own.

#include <cmath>
#include <cstdint>

#include "kernels/common/logit_key.h"
#include "kernels/common/overlapped_launch.cuh"
#include "kernels/row_ops/row_constants.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 128;

__global__ void __launch_bounds__(kBlockThreads) RowOperandsKernel(const RowOperandsParams params) {
  StartNextKernel();
  WaitForPreviousKernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (i >= params.num_rows) return;
  const int64_t row_index = params.source.RowIndexOf(i);
  params.log2_scales[i] = params.source.Log2ScaleAt(row_index);
  params.target_columns[i] = params.source.TargetColumnAt(row_index);
  params.target_logits[i] = 0.0F;
  if (params.max_keys != nullptr) params.max_keys[i] = 0;
}

/// Returns the value of a row, or 0 if there are no values.
__device__ double At(const RowValues& values, int64_t row_index) {
  return values.values == nullptr ? 0.0
                                  : static_cast<double>(values.values[row_index * values.stride]);
}

/// Returns the cached value of a row; `row_bytes` is the distance between rows, or 0 if contiguous.
template <typename T>
__device__ T CachedAt(const T* values, int64_t row, int64_t row_bytes) {
  if (row_bytes == 0) return values[row];
  return *reinterpret_cast<const T*>(reinterpret_cast<const char*>(values) + row * row_bytes);
}

/// Returns u of a logit (RowGradient), relative to the rounded log2_sum.
__device__ float ExponentOf(float logit, const RowGradient& row) {
  return __fmaf_rn(logit, row.log2_scale, -row.log2_sum);
}

/// Returns constants that make every gradient of a row 0, even when its logits are -inf or its
/// cached exponents are large. The infinite log2_sum makes every probability 0; with a finite
/// log2_sum the gradients of such rows would be NaN.
__device__ RowGradient NoGradient() {
  RowGradient row{};
  row.log2_scale = 1;
  row.log2_sum = INFINITY;
  row.target_column = row.max_column = -1;
  return row;
}

__global__ void __launch_bounds__(kBlockThreads)
    RowGradientsKernel(const RowGradientsParams params) {
  StartNextKernel();
  WaitForPreviousKernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (i >= params.num_rows) return;
  const int64_t row_index = params.source.RowIndexOf(i);
  if (params.source.targets[row_index] == params.ignore_index) {
    params.rows[i] = NoGradient();
    return;
  }
  const double d_logprob = At(params.d_logprob, row_index);
  const RowUpstream upstream = {At(params.d_lse, row_index) - d_logprob,
                                At(params.d_entropy, row_index), d_logprob,
                                At(params.d_mean_logit, row_index)};
  const double lse = static_cast<double>(params.lse[row_index]) + params.lse_rest[row_index];
  const double entropy = params.entropy == nullptr ? 0.0 : params.entropy[row_index];
  const float log2_scale = params.source.Log2ScaleAt(row_index);
  const double gradient_scale = static_cast<double>(log2_scale) * params.gradient_per_log2_scale;
  RowGradient row = RowGradientOf(upstream, lse, entropy, log2_scale, gradient_scale);
  row.target_column = params.source.TargetColumnAt(row_index);
  if (params.target_logits != nullptr) {
    const int64_t cached_row = params.cached_rows == nullptr ? i : params.cached_rows[i];
    if (params.max_keys != nullptr) {
      const LogitEntry largest =
          LogitEntryOf(CachedAt(params.max_keys, cached_row, params.cached_row_bytes));
      row.max_column = largest.id;
      row.max_exponent = ExponentOf(largest.logit, row);
    }
    row.target_exponent =
        ExponentOf(CachedAt(params.target_logits, cached_row, params.cached_row_bytes), row);
  }
  params.rows[i] = row;
}

}  // namespace

cudaError_t LaunchRowOperands(const RowOperandsParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  if (params.num_rows < 0 || params.num_rows > INT32_MAX || params.source.targets == nullptr ||
      params.log2_scales == nullptr || params.target_columns == nullptr ||
      params.target_logits == nullptr) {
    return cudaErrorInvalidValue;
  }
  const auto blocks = static_cast<uint32_t>((params.num_rows + kBlockThreads - 1) / kBlockThreads);
  return LaunchOverlapped(RowOperandsKernel, blocks, kBlockThreads, params, stream);
}

cudaError_t LaunchRowGradients(const RowGradientsParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  if (params.num_rows < 0 || params.num_rows > INT32_MAX || params.source.targets == nullptr ||
      params.lse == nullptr || params.lse_rest == nullptr || params.rows == nullptr ||
      (params.d_entropy.values != nullptr && params.entropy == nullptr) ||
      (params.max_keys != nullptr && params.target_logits == nullptr)) {
    return cudaErrorInvalidValue;
  }
  const auto blocks = static_cast<uint32_t>((params.num_rows + kBlockThreads - 1) / kBlockThreads);
  return LaunchOverlapped(RowGradientsKernel, blocks, kBlockThreads, params, stream);
}

}  // namespace logprobd::kernels
