// GatherRowsKernel: rows at some places -> rows that lie together.
//
// Idea      A copy, 16 bytes a thread. One call of the host, where a tensor library takes as long to
//           find its kernel as a thousand rows take to be copied.
// Work      A block a row.
// Traffic   Each row once in and once out.
// Numerics  None.
// Limits    2^31 - 1 rows.
// Source    Our own.

#include <cstdint>

#include "kernels/rows/gather_rows.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 128;
constexpr int kVectorBytes = 16;
constexpr int kUnrolled = 4;  // loads under way

__global__ void __launch_bounds__(kBlockThreads) GatherRowsKernel(const GatherRowsParams params) {
  const int64_t vectors = params.row_bytes / kVectorBytes;
  const int64_t stride = params.source_stride_bytes / kVectorBytes;
  const int64_t row = blockIdx.x;
  const uint4* const from = static_cast<const uint4*>(params.source) + params.places[row] * stride;
  uint4* const to = static_cast<uint4*>(params.rows) + row * vectors;
#pragma unroll kUnrolled
  for (int64_t i = threadIdx.x; i < vectors; i += kBlockThreads) to[i] = __ldg(from + i);
}

bool IsWhole(int64_t bytes) { return bytes >= 0 && bytes % kVectorBytes == 0; }

bool IsAligned(const void* pointer) {
  return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

}  // namespace

cudaError_t LaunchGatherRows(const GatherRowsParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  if (params.num_rows < 0 || params.num_rows > INT32_MAX || params.places == nullptr ||
      !IsAligned(params.source) || !IsAligned(params.rows) || !IsWhole(params.row_bytes) ||
      !IsWhole(params.source_stride_bytes)) {
    return cudaErrorInvalidValue;
  }
  GatherRowsKernel<<<static_cast<uint32_t>(params.num_rows), kBlockThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
