// RowGradientsKernel: upstream gradients and scores of a row -> the constants of its gradient.
//
// Work      A thread a row.
// Traffic   Some 80 bytes a row.
// Numerics  fp64, rounded once (kernels/common/row_gradient.h).
// Limits    None.
// Source    Our own.

#include <cmath>
#include <cstdint>

#include "kernels/common/logit_key.h"
#include "kernels/row_ops/row_gradients.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 128;

__device__ double At(const RowValues& values, int64_t place) {
  return values.values == nullptr ? 0.0 : static_cast<double>(values.values[place * values.stride]);
}

template <typename T>
__device__ T KeptAt(const T* values, int64_t row, int64_t row_bytes) {
  if (row_bytes == 0) return values[row];
  return *reinterpret_cast<const T*>(reinterpret_cast<const char*>(values) + row * row_bytes);
}

/// u of a logit: relative to the rounded sum.
__device__ float ExponentOf(float logit, const RowGradient& row) {
  return __fmaf_rn(logit, row.log2_scale, -row.log2_sum);
}

/// Of a row whose probabilities are 0, be its logits -inf or its kept exponents large: with a sum
/// of 1 these would make NaN.
__device__ RowGradient NoGradient() {
  RowGradient row{};
  row.log2_scale = 1;
  row.log2_sum = INFINITY;
  row.target_column = row.max_column = -1;
  return row;
}

__global__ void __launch_bounds__(kBlockThreads)
    RowGradientsKernel(const RowGradientsParams params) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (i >= params.num_rows) return;
  const int64_t place = params.source.RowIndexOf(i);
  if (params.source.targets[place] == params.ignore_index) {
    params.rows[i] = NoGradient();
    return;
  }
  const double d_logprob = At(params.d_logprob, place);
  const RowUpstream upstream = {At(params.d_lse, place) - d_logprob, At(params.d_entropy, place),
                                d_logprob, At(params.d_mean_logit, place)};
  const double lse = static_cast<double>(params.lse[place]) + params.lse_rest[place];
  const double entropy = params.entropy == nullptr ? 0.0 : params.entropy[place];
  const float log2_scale = params.source.Log2ScaleAt(place);
  const double gradient_scale = static_cast<double>(log2_scale) * params.gradient_per_log2_scale;
  RowGradient row = RowGradientOf(upstream, lse, entropy, log2_scale, gradient_scale);
  row.target_column = params.source.TargetColumnAt(place);
  if (params.target_logits != nullptr) {
    const int64_t kept = params.kept_places == nullptr ? i : params.kept_places[i];
    if (params.max_keys != nullptr) {
      const LogitEntry largest = LogitEntryOf(KeptAt(params.max_keys, kept, params.kept_row_bytes));
      row.max_column = largest.id;
      row.max_exponent = ExponentOf(largest.logit, row);
    }
    row.target_exponent =
        ExponentOf(KeptAt(params.target_logits, kept, params.kept_row_bytes), row);
  }
  params.rows[i] = row;
}

}  // namespace

cudaError_t LaunchRowGradients(const RowGradientsParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  if (params.num_rows < 0 || params.num_rows > INT32_MAX || params.source.targets == nullptr ||
      params.lse == nullptr || params.lse_rest == nullptr || params.rows == nullptr ||
      (params.d_entropy.values != nullptr && params.entropy == nullptr) ||
      (params.max_keys != nullptr && params.target_logits == nullptr)) {
    return cudaErrorInvalidValue;
  }
  const auto blocks = static_cast<uint32_t>((params.num_rows + kBlockThreads - 1) / kBlockThreads);
  RowGradientsKernel<<<blocks, kBlockThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
