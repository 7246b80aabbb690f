#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tests/bench/bench_kernels.h"

namespace logprobd::testing {
namespace {

constexpr int64_t kClockNanoseconds = 20'000;

/// Returns a standard normal value: the Box-Muller transform of a hash of the index.
__device__ float Normal(uint64_t index, uint64_t seed) {
  uint64_t x = index * 0x9E3779B97F4A7C15ULL + seed * 0xD1B54A32D192ED03ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  x ^= x >> 31;
  const float u = (static_cast<float>(static_cast<uint32_t>(x)) + 1.0F) * 2.328306e-10F;
  const float v = static_cast<float>(static_cast<uint32_t>(x >> 32)) * 2.328306e-10F;
  return sqrtf(-2.0F * logf(fminf(u, 1.0F))) * cospif(2.0F * v);
}

__device__ void Store(__nv_bfloat16* out, float value) { *out = __float2bfloat16_rn(value); }
__device__ void Store(float* out, float value) { *out = value; }

template <typename T>
__global__ void FillNormalKernel(T* out, int64_t count, NormalFill fill) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    Store(out + i, Normal(static_cast<uint64_t>(i), fill.seed) * fill.stddev + fill.mean);
  }
}

/// Reads `count` words of 16 bytes. Each thread has four loads in flight.
__global__ void ReadAllKernel(const uint4* in, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  uint32_t mixed = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count / 4;
       i += stride) {
    uint4 words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = __ldcs(in + i + j * (count / 4));
#pragma unroll
    for (int j = 0; j < 4; ++j) mixed ^= words[j].x ^ words[j].y ^ words[j].z ^ words[j].w;
  }
  if (mixed == 0x9E3779B9U) __nanosleep(1);  // keeps the compiler from removing the loads
}

__device__ int64_t Nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void ReadClockKernel(float* out) {
  const int64_t begin = Nanoseconds();
  const int64_t cycles = clock64();
  while (Nanoseconds() - begin < kClockNanoseconds) {
  }
  *out = static_cast<float>(clock64() - cycles) * 1e3F / static_cast<float>(Nanoseconds() - begin);
}

/// Number of rows and columns of a block, and step along the hidden size.
constexpr int kSide = 16;

__device__ double ToDouble(float value) { return value; }
__device__ double ToDouble(__half value) { return __half2float(value); }
__device__ double ToDouble(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ double ElementOrZero(const T* array, int64_t row, int64_t num_rows, int64_t k,
                                int64_t hidden_size) {
  return row < num_rows && k < hidden_size ? ToDouble(array[row * hidden_size + k]) : 0.0;
}

/// Computes one logit per thread. Blocks with the same columns are consecutive, so that most of
/// them read the weight from a cache.
template <typename T>
__global__ void __launch_bounds__(kSide* kSide)
    LogitsReferenceKernel(const LogitsReferenceParams params) {
  __shared__ double hidden[kSide][kSide];      // [row, k]
  __shared__ double weight[kSide][kSide + 1];  // [column, k], padded since a warp reads 16 columns
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

cudaError_t FillNormal(void* out, int64_t count, const NormalFill& fill) {
  switch (fill.dtype) {
    case kernels::Dtype::kBf16:
      FillNormalKernel<<<2048, 256>>>(static_cast<__nv_bfloat16*>(out), count, fill);
      return cudaGetLastError();
    case kernels::Dtype::kF32:
      FillNormalKernel<<<2048, 256>>>(static_cast<float*>(out), count, fill);
      return cudaGetLastError();
    case kernels::Dtype::kF16:
      break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchReadAll(const void* in, int64_t bytes, cudaStream_t stream) {
  ReadAllKernel<<<132 * 8, 256, 0, stream>>>(static_cast<const uint4*>(in), bytes / 16);
  return cudaGetLastError();
}

cudaError_t LaunchReadClock(float* out, cudaStream_t stream) {
  ReadClockKernel<<<1, 1, 0, stream>>>(out);
  return cudaGetLastError();
}

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
