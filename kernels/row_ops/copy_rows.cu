// CopyRowsKernel: rows at some places -> rows that lie together, each times its factor.
//
// Idea      16 bytes a thread, in one call of the host. A tensor library takes as long to find its
//           kernel for a gather as a thousand rows take to be copied, and multiplies 16-bit rows by
//           fp32 factors an element a thread.
// Work      A block a row.
// Traffic   Each row once in and once out.
// Numerics  None without factors; fp32 products, rounded once.
// Limits    2^31 - 1 rows.
// Source    Our own.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/row_ops/copy_rows.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 128;
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
  const int64_t place = params.row_indices == nullptr ? row : params.row_indices[row];
  const int64_t vectors = params.row_bytes / kVectorBytes;
  const int64_t stride = params.source_stride_bytes / kVectorBytes;
  const uint4* const from = static_cast<const uint4*>(params.source) + place * stride;
  uint4* const to = static_cast<uint4*>(params.rows) + row * vectors;
  for (int64_t i = threadIdx.x; i < vectors; i += kBlockThreads) to[i] = change(from[i]);
}

__global__ void __launch_bounds__(kBlockThreads) CopyRowsKernel(const CopyRowsParams params) {
  CopyRow(params, Copied{});
}

template <class Element>
__global__ void __launch_bounds__(kBlockThreads) MultiplyRowsKernel(const CopyRowsParams params) {
  CopyRow(params, Multiplied<Element>{params.factors[blockIdx.x]});
}

bool IsWhole(int64_t bytes) { return bytes >= 0 && bytes % kVectorBytes == 0; }

bool IsAligned(const void* pointer) {
  return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
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
    CopyRowsKernel<<<blocks, kBlockThreads, 0, stream>>>(params);
    return cudaGetLastError();
  }
  switch (params.dtype) {
    case Dtype::kBf16:
      MultiplyRowsKernel<__nv_bfloat16><<<blocks, kBlockThreads, 0, stream>>>(params);
      break;
    case Dtype::kF16:
      MultiplyRowsKernel<__half><<<blocks, kBlockThreads, 0, stream>>>(params);
      break;
    case Dtype::kF32:
      MultiplyRowsKernel<float><<<blocks, kBlockThreads, 0, stream>>>(params);
      break;
  }
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
