#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tests/bench/logits_reference.h"

namespace logprobd::testing {
namespace {

/// Rows and columns of a block, and its step along the hidden size.
constexpr int kSide = 16;

__device__ double ToDouble(float value) { return value; }
__device__ double ToDouble(__half value) { return __half2float(value); }
__device__ double ToDouble(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ double ElementOrZero(const T* array, int64_t row, int64_t num_rows, int64_t k,
                                int64_t hidden_size) {
  return row < num_rows && k < hidden_size ? ToDouble(array[row * hidden_size + k]) : 0.0;
}

/// One thread a logit. Blocks of the same columns follow one another, so that the weight is read
/// from a cache.
template <typename T>
__global__ void __launch_bounds__(kSide* kSide)
    LogitsReferenceKernel(const LogitsReferenceParams params) {
  __shared__ double hidden[kSide][kSide];      // [row, k]
  __shared__ double weight[kSide][kSide + 1];  // [column, k]; padded: a warp reads 16 columns
  const auto* const hidden_rows = static_cast<const T*>(params.hidden);
  const auto* const weight_rows = static_cast<const __nv_bfloat16*>(params.weight);
  const int64_t block_row = static_cast<int64_t>(blockIdx.x) * kSide;
  const int64_t block_column = static_cast<int64_t>(blockIdx.y) * kSide;
  double sum = 0;
  for (int64_t step = 0; step < params.hidden_size; step += kSide) {
    const int64_t k = step + threadIdx.x;
    hidden[threadIdx.y][threadIdx.x] =
        ElementOrZero(hidden_rows, block_row + threadIdx.y, params.num_rows, k, params.hidden_size);
    weight[threadIdx.y][threadIdx.x] = ElementOrZero(weight_rows, block_column + threadIdx.y,
                                                     params.vocab_size, k, params.hidden_size);
    __syncthreads();
    for (int i = 0; i < kSide; ++i) sum += hidden[threadIdx.y][i] * weight[threadIdx.x][i];
    __syncthreads();
  }
  const int64_t row = block_row + threadIdx.y;
  const int64_t column = block_column + threadIdx.x;
  if (row < params.num_rows && column < params.vocab_size) {
    params.logits[row * params.vocab_size + column] = sum;
  }
}

template <typename T>
cudaError_t Launch(const LogitsReferenceParams& params, cudaStream_t stream) {
  const auto blocks = [](int64_t count) {
    return static_cast<uint32_t>((count + kSide - 1) / kSide);
  };
  LogitsReferenceKernel<T>
      <<<dim3(blocks(params.num_rows), blocks(params.vocab_size)), dim3(kSide, kSide), 0, stream>>>(
          params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchLogitsReference(const LogitsReferenceParams& params, cudaStream_t stream) {
  if (params.num_rows < 1 || params.vocab_size < 1 || params.vocab_size >= 1 << 20) {
    return cudaErrorInvalidValue;
  }
  switch (params.hidden_dtype) {
    case kernels::Dtype::kBf16:
      return Launch<__nv_bfloat16>(params, stream);
    case kernels::Dtype::kF16:
      return Launch<__half>(params, stream);
    case kernels::Dtype::kF32:
      return Launch<float>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace logprobd::testing
