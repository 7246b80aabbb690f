// CopyRowsKernel, MultiplyRowsKernel: copy some rows into contiguous memory; MultiplyRowsKernel
// also multiplies each row by its factor.
//
// Idea      16 bytes per thread and step, one host call. For a thousand rows a tensor library needs
//           as long to find its gather kernel as the copy takes, and it multiplies 16-bit rows by
//           fp32 factors one element per thread.
// Work      One block per row.
// Traffic   Reads and writes each row once.
// Numerics  Without factors the bits are copied; with factors the products are fp32, rounded once.
// Limits    2^31 - 1 rows.
// Source    Our own.
//
// ScaleUnlessOneKernel: multiplies gradients by the gradient of the loss, which is nearly always 1.
//
// Idea      The host need not wait for the factor: the kernel reads it and returns if it is 1.
// Work      16 bytes per thread and step, grid-stride loop.
// Traffic   None for a factor of 1; otherwise reads and writes every element once.
// Numerics  fp32 products, rounded once.
// Limits    None.
// Source    Our own.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/common/overlapped_launch.cuh"
#include "kernels/row_ops/copy_and_scale.h"

namespace logprobd::kernels {
namespace {

constexpr int kCopyThreads = 128;
constexpr int kVectorBytes = 16;

struct Copied {
  __device__ uint4 operator()(uint4 words) const { return words; }
};

template <class Element>
struct Multiplied {
  float factor;

  __device__ uint4 operator()(uint4 words) const {
    auto* const elements = reinterpret_cast<Element*>(&words);
#pragma unroll
    for (size_t i = 0; i < sizeof(words) / sizeof(Element); ++i) {
      elements[i] = static_cast<Element>(static_cast<float>(elements[i]) * factor);
    }
    return words;
  }
};

template <class Change>
__device__ void CopyRow(const CopyRowsParams& params, const Change& change) {
  const int64_t row = blockIdx.x;
  const int64_t source_row = params.row_indices == nullptr ? row : params.row_indices[row];
  const int64_t vectors = params.row_bytes / kVectorBytes;
  const int64_t stride = params.source_stride_bytes / kVectorBytes;
  const uint4* const from = static_cast<const uint4*>(params.source) + source_row * stride;
  uint4* const to = static_cast<uint4*>(params.rows) + row * vectors;
  for (int64_t i = threadIdx.x; i < vectors; i += kCopyThreads) to[i] = change(from[i]);
}

__global__ void __launch_bounds__(kCopyThreads) CopyRowsKernel(const CopyRowsParams params) {
  StartNextKernel();
  WaitForPreviousKernel();
  CopyRow(params, Copied{});
}

template <class Element>
__global__ void __launch_bounds__(kCopyThreads) MultiplyRowsKernel(const CopyRowsParams params) {
  StartNextKernel();
  WaitForPreviousKernel();
  CopyRow(params, Multiplied<Element>{params.factors[blockIdx.x]});
}

bool IsWhole(int64_t bytes) { return bytes >= 0 && bytes % kVectorBytes == 0; }

bool IsAligned(const void* pointer) {
  return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

constexpr int kScaleThreads = 256;
constexpr int64_t kBlocksMax = 1'056;  // eight per multiprocessor of an H200

template <class Element>
__global__ void __launch_bounds__(kScaleThreads)
    ScaleUnlessOneKernel(Element* values, int64_t count, const float* factor_at) {
  const float factor = *factor_at;
  if (factor == 1.0F) return;
  constexpr int kVector = kVectorBytes / sizeof(Element);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kScaleThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kScaleThreads;
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
cudaError_t LaunchScale(void* values, int64_t count, const float* factor, cudaStream_t stream) {
  constexpr int64_t kBlockElements = kScaleThreads * kVectorBytes / sizeof(Element);
  const auto blocks =
      static_cast<uint32_t>(std::min((count + kBlockElements - 1) / kBlockElements, kBlocksMax));
  ScaleUnlessOneKernel<<<blocks, kScaleThreads, 0, stream>>>(static_cast<Element*>(values), count,
                                                             factor);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchCopyRows(const CopyRowsParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  if (params.num_rows < 0 || params.num_rows > INT32_MAX || !IsAligned(params.source) ||
      !IsAligned(params.rows) || !IsWhole(params.row_bytes) ||
      !IsWhole(params.source_stride_bytes)) {
    return cudaErrorInvalidValue;
  }
  const auto blocks = static_cast<uint32_t>(params.num_rows);
  if (params.factors == nullptr) {
    return LaunchOverlapped(CopyRowsKernel, blocks, kCopyThreads, params, stream);
  }
  switch (params.dtype) {
    case Dtype::kBf16:
      return LaunchOverlapped(MultiplyRowsKernel<__nv_bfloat16>, blocks, kCopyThreads, params,
                              stream);
    case Dtype::kF16:
      return LaunchOverlapped(MultiplyRowsKernel<__half>, blocks, kCopyThreads, params, stream);
    case Dtype::kF32:
      return LaunchOverlapped(MultiplyRowsKernel<float>, blocks, kCopyThreads, params, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchScaleUnlessOne(void* values, Dtype dtype, int64_t count, const float* factor,
                                 cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  if (values == nullptr || factor == nullptr || count < 0 ||
      reinterpret_cast<uintptr_t>(values) % kVectorBytes != 0) {
    return cudaErrorInvalidValue;
  }
  switch (dtype) {
    case Dtype::kBf16:
      return LaunchScale<__nv_bfloat16>(values, count, factor, stream);
    case Dtype::kF16:
      return LaunchScale<__half>(values, count, factor, stream);
    case Dtype::kF32:
      return LaunchScale<float>(values, count, factor, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace logprobd::kernels
