// TopKKernel: merges a chunk of logits into each row's running best k.
//
// Idea      kernels/common/top_k.cuh.
// Work      A block a row; four columns a thread and step.
// Traffic   4 bytes a logit, 16 k bytes a row and chunk.
// Numerics  Exact.
// Limits    k <= kTopKMax.
// Source    Our own.

#include <cstdint>

#include "kernels/chunked/logit_chunk.cuh"
#include "kernels/chunked/top_k.h"
#include "kernels/common/top_k.cuh"

namespace logprobd::kernels {
namespace {

template <bool kTransform>
struct ChunkRow {
  const LogitChunk& chunk;
  int64_t row;

  __device__ __forceinline__ float Load(int32_t column) const {
    return LogitAt<kTransform>(chunk, row, column);
  }
  __device__ __forceinline__ uint64_t Key(int32_t column, float logit) const {
    return LogitKey(logit, static_cast<int32_t>(chunk.tile_begin) * kTileColumns + column);
  }
};

template <bool kTransform>
__global__ void __launch_bounds__(kTopKThreads)
    TopKKernel(const TopKParams params, const int32_t valid_columns) {
  const int64_t row = blockIdx.x;
  FindTopK(ChunkRow<kTransform>{params.chunk, row}, valid_columns, params.top_k,
           {.from_best = true}, params.keys + row * params.top_k);
}

}  // namespace

cudaError_t LaunchTopK(const TopKParams& params, cudaStream_t stream) {
  if (!IsValid(params.chunk) || params.top_k < 1 || params.top_k > kTopKMax ||
      params.keys == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (params.chunk.num_rows == 0) return cudaSuccess;
  const auto blocks = static_cast<uint32_t>(params.chunk.num_rows);
  const auto kernel = HasTransform(params.chunk) ? TopKKernel<true> : TopKKernel<false>;
  kernel<<<blocks, kTopKThreads, 0, stream>>>(params,
                                              static_cast<int32_t>(ValidColumns(params.chunk)));
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
