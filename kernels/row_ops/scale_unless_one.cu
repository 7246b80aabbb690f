// ScaleUnlessOneKernel: gradients times the loss's own gradient, which is nearly always 1.
//
// Idea      The host need not wait to learn the factor: the kernel looks, and ends.
// Work      A thread eight elements, grid-stride.
// Traffic   None for the factor 1, else reads and writes every element once.
// Numerics  fp32 products, rounded once.
// Limits    None.
// Source    Our own.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/row_ops/scale_unless_one.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 256;
constexpr int kVectorBytes = 16;
constexpr int64_t kBlocksMax = 1'056;  // eight a multiprocessor

template <class Element>
__global__ void __launch_bounds__(kBlockThreads)
    ScaleUnlessOneKernel(Element* values, int64_t count, const float* factor_at) {
  const float factor = *factor_at;
  if (factor == 1.0F) return;
  constexpr int kVector = kVectorBytes / sizeof(Element);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kBlockThreads;
  const int64_t vectors = count / kVector;
  for (int64_t i = first; i < vectors; i += stride) {
    uint4 words = reinterpret_cast<const uint4*>(values)[i];
    auto* const elements = reinterpret_cast<Element*>(&words);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      elements[j] = static_cast<Element>(static_cast<float>(elements[j]) * factor);
    }
    reinterpret_cast<uint4*>(values)[i] = words;
  }
  for (int64_t i = vectors * kVector + first; i < count; i += stride) {
    values[i] = static_cast<Element>(static_cast<float>(values[i]) * factor);
  }
}

template <class Element>
cudaError_t Launch(void* values, int64_t count, const float* factor, cudaStream_t stream) {
  constexpr int64_t kBlockElements = kBlockThreads * kVectorBytes / sizeof(Element);
  const auto blocks =
      static_cast<uint32_t>(std::min((count + kBlockElements - 1) / kBlockElements, kBlocksMax));
  ScaleUnlessOneKernel<<<blocks, kBlockThreads, 0, stream>>>(static_cast<Element*>(values), count,
                                                             factor);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchScaleUnlessOne(void* values, Dtype dtype, int64_t count, const float* factor,
                                 cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  if (values == nullptr || factor == nullptr || count < 0 ||
      reinterpret_cast<uintptr_t>(values) % kVectorBytes != 0) {
    return cudaErrorInvalidValue;
  }
  switch (dtype) {
    case Dtype::kBf16:
      return Launch<__nv_bfloat16>(values, count, factor, stream);
    case Dtype::kF16:
      return Launch<__half>(values, count, factor, stream);
    case Dtype::kF32:
      return Launch<float>(values, count, factor, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace logprobd::kernels
