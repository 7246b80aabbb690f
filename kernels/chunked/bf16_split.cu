// Bf16SplitKernel: hidden rows in fp32 or fp16 to sums of bf16 terms.
//
// Idea      x = hi + lo, hi the bf16 value nearest x, lo the one nearest x - hi, and so on: tensor
//           cores then multiply what they otherwise could not, at nearly fp32's precision.
// Work      A thread two neighbouring elements, a block column of 256 threads along a row.
// Traffic   Reads 4 (or 2), writes 2 bytes an element and term: memory bound.
// Numerics  Two terms: fp16 exact, fp32 2^-17 relative. Three: fp32 exact. What is below bf16's
//           range is lost, and values above its largest (3.39e38) make the row not finite.
// Limits    2^31 rows.
// Source    Our own; the split is the usual one.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/chunked/bf16_split.h"
#include "kernels/common/terms.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 256;

template <Dtype kDtype>
__device__ __forceinline__ float Element(const void* row, int64_t k) {
  if constexpr (kDtype == Dtype::kF32) {
    return static_cast<const float*>(row)[k];
  } else {
    return __half2float(static_cast<const __half*>(row)[k]);
  }
}

/// A term has `pairs` pairs of elements.
template <Dtype kDtype>
__global__ void __launch_bounds__(kBlockThreads)
    Bf16SplitKernel(const Bf16SplitParams params, const int64_t pairs) {
  constexpr int64_t kElementBytes = kDtype == Dtype::kF32 ? 4 : 2;
  const int64_t row = blockIdx.x;
  const auto* const in =
      static_cast<const char*>(params.in) + row * params.in_stride * kElementBytes;
  auto* const out = static_cast<__nv_bfloat162*>(params.out) + row * params.num_splits * pairs;
  for (int64_t pair = threadIdx.x; pair < pairs; pair += kBlockThreads) {
    const int64_t k = 2 * pair;
    float x = k < params.hidden_size ? Element<kDtype>(in, k) : 0.0F;
    float y = k + 1 < params.hidden_size ? Element<kDtype>(in, k + 1) : 0.0F;
    for (int32_t term = params.num_splits - 1; term >= 0; --term) {
      const __nv_bfloat162 nearest(__float2bfloat16_rn(x), __float2bfloat16_rn(y));
      out[term * pairs + pair] = nearest;
      x = __fsub_rn(x, __low2float(nearest));  // exact
      y = __fsub_rn(y, __high2float(nearest));
    }
  }
}

}  // namespace

cudaError_t LaunchBf16Split(const Bf16SplitParams& params, cudaStream_t stream) {
  if (params.dtype == Dtype::kBf16 || params.in == nullptr || params.out == nullptr ||
      params.num_rows < 0 || params.num_rows > INT32_MAX || params.hidden_size < 1 ||
      params.in_stride < params.hidden_size || params.in_stride % 4 != 0 || params.num_splits < 1 ||
      params.num_splits > kHiddenSplitsMax) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  const auto kernel =
      params.dtype == Dtype::kF32 ? Bf16SplitKernel<Dtype::kF32> : Bf16SplitKernel<Dtype::kF16>;
  kernel<<<static_cast<uint32_t>(params.num_rows), kBlockThreads, 0, stream>>>(
      params, SplitPitch(params.hidden_size) / 2);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
