// GatherLogitsKernel: the logits of listed (row, id) pairs, out of one chunk.
//
// Idea      The chunk is about to be overwritten: each pair takes its logit from its chunk.
// Work      A thread a pair.
// Traffic   8 bytes a pair and chunk, and a sector for each hit.
// Numerics  The logit has the bits that the other kernels see.
// Limits    2^31 pairs a launch.
// Source    Our own.

#include <cstdint>

#include "kernels/chunked/gather_logits.h"
#include "kernels/chunked/logit_chunk.cuh"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 256;

__global__ void __launch_bounds__(kBlockThreads)
    GatherLogitsKernel(const GatherLogitsParams params, const int64_t valid_columns) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (i >= params.count) return;
  const int64_t row = static_cast<int64_t>(params.rows[i]) - params.row_begin;
  const int64_t column = params.ids[i] - params.chunk.tile_begin * kTileColumns;
  if (row < 0 || row >= params.chunk.num_rows || column < 0 || column >= valid_columns) return;
  params.logits[i] = LogitAt<true>(params.chunk, row, column);
}

}  // namespace

cudaError_t LaunchGatherLogits(const GatherLogitsParams& params, cudaStream_t stream) {
  if (!IsValid(params.chunk) || params.count < 0 || params.count > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (params.count == 0 || params.chunk.num_rows == 0) return cudaSuccess;
  if (params.rows == nullptr || params.ids == nullptr || params.logits == nullptr) {
    return cudaErrorInvalidValue;
  }
  const int64_t blocks = (params.count + kBlockThreads - 1) / kBlockThreads;
  GatherLogitsKernel<<<static_cast<uint32_t>(blocks), kBlockThreads, 0, stream>>>(
      params, ValidColumns(params.chunk));
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
