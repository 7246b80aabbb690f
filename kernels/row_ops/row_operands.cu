// RowOperandsKernel: a trainer's targets and temperatures -> what the fused kernels take.
//
// Idea      One launch instead of a dozen: for few rows launches are what takes time.
// Work      A thread a row.
// Traffic   Some 40 bytes a row.
// Numerics  log2_scale in fp64, rounded once.
// Limits    None.
// Source    Our own.

#include <cstdint>

#include "kernels/row_ops/row_operands.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 128;

__global__ void __launch_bounds__(kBlockThreads) RowOperandsKernel(const RowOperandsParams params) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (i >= params.num_rows) return;
  const int64_t place = params.source.RowIndexOf(i);
  params.log2_scales[i] = params.source.Log2ScaleAt(place);
  params.target_columns[i] = params.source.TargetColumnAt(place);
  params.target_logits[i] = 0.0F;
  if (params.max_keys != nullptr) params.max_keys[i] = 0;
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
  RowOperandsKernel<<<blocks, kBlockThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
