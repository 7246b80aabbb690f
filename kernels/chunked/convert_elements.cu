// Bf16SplitKernel: converts hidden rows in fp32 or fp16 to bf16 splits (kernels/common/dtype.h).
//
// Idea      x = hi + lo, where hi is the bf16 value nearest to x, lo the one nearest to x - hi, and
//           so on. Tensor cores can then multiply fp32 values by bf16 weights at nearly fp32
//           precision.
// Work      One block per row, two neighbouring elements per thread and step.
// Traffic   Reads 4 (fp32) or 2 (fp16) bytes per element, writes 2 per element and split: memory
//           bound.
// Numerics  Two splits represent fp16 exactly and fp32 to 2^-17 relative, three represent fp32
//           exactly. Values below the range of bf16 become 0; values above its largest finite value
//           (3.39e38) make the row not finite.
// Limits    2^31 - 1 rows.
// Source    Our own; the split is a common technique.
//
// WidenKernel: converts 16-bit elements to fp32.
//
// Idea      Every bf16 and fp16 value is an fp32 value, so mixed pairs of dtypes lose nothing when
//           they are multiplied in fp32.
// Work      Eight elements per thread and step, grid-stride loop.
// Traffic   Reads 2 and writes 4 bytes per element: memory bound.
// Numerics  Exact, except for NaN payloads.
// Limits    The number of elements is a multiple of 8.
// Source    Our own.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/chunked/convert_elements.h"

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

/// `pairs` is the number of pairs of elements of one split.
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
    for (int32_t split = params.num_splits - 1; split >= 0; --split) {
      const __nv_bfloat162 nearest(__float2bfloat16_rn(x), __float2bfloat16_rn(y));
      out[split * pairs + pair] = nearest;
      x = __fsub_rn(x, __low2float(nearest));  // exact
      y = __fsub_rn(y, __high2float(nearest));
    }
  }
}

constexpr int kThreadElements = 8;
constexpr int64_t kBlocksMax = 8192;

/// Converts the two elements of a word; the lower half comes first.
template <Dtype kDtype>
__device__ __forceinline__ float2 WidenPair(uint32_t pair) {
  if constexpr (kDtype == Dtype::kBf16) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000U));
  } else {
    return make_float2(__half2float(__ushort_as_half(static_cast<unsigned short>(pair & 0xFFFFU))),
                       __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16))));
  }
}

template <Dtype kDtype>
__global__ void __launch_bounds__(kBlockThreads)
    WidenKernel(const uint4* in, float4* out, const int64_t num_vectors) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kBlockThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x; i < num_vectors;
       i += stride) {
    const uint4 words = in[i];
    const float2 a = WidenPair<kDtype>(words.x);
    const float2 b = WidenPair<kDtype>(words.y);
    const float2 c = WidenPair<kDtype>(words.z);
    const float2 d = WidenPair<kDtype>(words.w);
    out[2 * i] = make_float4(a.x, a.y, b.x, b.y);
    out[2 * i + 1] = make_float4(c.x, c.y, d.x, d.y);
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

cudaError_t LaunchWiden(const void* in, Dtype dtype, int64_t count, float* out,
                        cudaStream_t stream) {
  if (in == nullptr || out == nullptr || count < 0 || count % kThreadElements != 0 ||
      dtype == Dtype::kF32) {
    return cudaErrorInvalidValue;
  }
  if (count == 0) return cudaSuccess;
  const int64_t num_vectors = count / kThreadElements;
  const auto blocks = static_cast<uint32_t>(
      std::min((num_vectors + kBlockThreads - 1) / kBlockThreads, kBlocksMax));
  const auto kernel = dtype == Dtype::kBf16 ? WidenKernel<Dtype::kBf16> : WidenKernel<Dtype::kF16>;
  kernel<<<blocks, kBlockThreads, 0, stream>>>(static_cast<const uint4*>(in),
                                               reinterpret_cast<float4*>(out), num_vectors);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
