// WidenKernel: 16-bit elements to fp32.
//
// Idea      Every bf16 and fp16 value is an fp32 value: mixed pairs lose nothing by it.
// Work      A thread eight elements, grid-stride.
// Traffic   Reads 2 bytes, writes 4 an element: memory bound.
// Numerics  Exact, NaN payloads aside.
// Limits    None.
// Source    Our own.

#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/chunked/widen.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 256;
constexpr int kThreadElements = 8;
constexpr int64_t kBlocksMax = 8192;

/// The two elements of a word, low half first.
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
