// RowScoresKernel: tile partials of a row -> its scores.
//
// Idea      First the row's largest exponent over its tiles, then every sum moved to it, quantised
//           once and added as 64-bit integers: integer addition is associative, so the grouping
//           over threads does not show in the bits.
// Work      A block a row; thread t takes the tiles t, t + 128, ...
// Traffic   16 bytes a tile, twice (the second time from a cache), 28 with extremes.
// Numerics  Exact sums of the partials to 2^-42, relative to the row's exponent; the rest in fp64.
// Limits    V <= 2^20 (row_sums.h).
// Source    Our own; kernels/common/row_sums.h.

#include <cstdint>

#include "kernels/combine/row_scores.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 128;
constexpr int kWarpThreads = 32;
constexpr int kBlockWarps = kBlockThreads / kWarpThreads;
constexpr unsigned kFullWarp = 0xFFFFFFFFU;

struct Add {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return b > a ? b : a;
  }
};
struct Smaller {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

/// Joins a value of every thread; all get the result. `scratch` holds kBlockWarps of T and may be
/// used again at once.
template <typename T, typename Operation>
__device__ T BlockReduce(T value, const Operation& join, T* scratch) {
#pragma unroll
  for (int mask = kWarpThreads / 2; mask > 0; mask /= 2) {
    value = join(value, __shfl_xor_sync(kFullWarp, value, mask));
  }
  if (threadIdx.x % kWarpThreads == 0) scratch[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  value = scratch[0];
#pragma unroll
  for (int warp = 1; warp < kBlockWarps; ++warp) value = join(value, scratch[warp]);
  __syncthreads();
  return value;
}

__device__ __forceinline__ TileSums Load(const TileSums* sums) {
  const float4 words = *reinterpret_cast<const float4*>(sums);
  return {__float_as_int(words.x), words.y, words.z, words.w};
}

/// The sums of one row, the same in every thread.
__device__ RowSums SumTiles(const TileSums* sums, int64_t num_tiles, int64_t* scratch) {
  int32_t exponent = kEmptyExponent;
  for (int64_t tile = threadIdx.x; tile < num_tiles; tile += kBlockThreads) {
    exponent = Larger()(exponent, sums[tile].exponent);
  }
  RowSums row;
  row.exponent = BlockReduce(exponent, Larger(), reinterpret_cast<int32_t*>(scratch));
  for (int64_t tile = threadIdx.x; tile < num_tiles; tile += kBlockThreads) {
    AddTile(row, Load(sums + tile));
  }
  row.sum = BlockReduce(row.sum, Add(), scratch);
  row.weighted = BlockReduce(row.weighted, Add(), scratch);
  row.sum_squares = BlockReduce(row.sum_squares, Add(), scratch);
  return row;
}

/// A logit and its column as one number: the larger logit is larger, among equals the lower column.
__device__ __forceinline__ uint64_t ExtremeKey(float logit, int32_t column) {
  const uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0F));  // -0 counts as +0
  const uint32_t ordered = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~column);
}

__device__ __forceinline__ float ExtremeLogit(uint64_t key) {
  const auto ordered = static_cast<uint32_t>(key >> 32);
  return __uint_as_float((ordered & 0x80000000U) != 0 ? ordered & 0x7FFFFFFFU : ~ordered);
}

__device__ void WriteExtremes(const RowScoresParams& params, int64_t row,
                              const RowNormalizer& normalizer, int64_t* scratch) {
  const TileExtremes* extremes = params.extremes + row * params.num_tiles;
  uint64_t best = 0;
  float min_logit = INFINITY;
  for (int64_t tile = threadIdx.x; tile < params.num_tiles; tile += kBlockThreads) {
    const TileExtremes extreme = extremes[tile];
    best = Larger()(best, ExtremeKey(extreme.max_logit, extreme.argmax));
    min_logit = Smaller()(min_logit, extreme.min_logit);
  }
  best = BlockReduce(best, Larger(), reinterpret_cast<uint64_t*>(scratch));
  min_logit = BlockReduce(min_logit, Smaller(), reinterpret_cast<float*>(scratch));
  if (threadIdx.x != 0) return;
  const bool finite = normalizer.finite;
  const float max_logit = ExtremeLogit(best);
  if (params.argmax_id != nullptr) {
    params.argmax_id[row] = finite ? static_cast<int32_t>(~static_cast<uint32_t>(best)) : -1;
  }
  if (params.argmax_logprob != nullptr) {
    params.argmax_logprob[row] = LogprobOf(max_logit, params.log2_scales[row], normalizer);
  }
  if (params.max_logit != nullptr) params.max_logit[row] = finite ? max_logit : NAN;
  if (params.min_logit != nullptr) params.min_logit[row] = finite ? min_logit : NAN;
}

__global__ void __launch_bounds__(kBlockThreads) RowScoresKernel(const RowScoresParams params) {
  __shared__ int64_t scratch[kBlockWarps];
  const int64_t row = blockIdx.x;
  const RowSums sums = SumTiles(params.sums + row * params.num_tiles, params.num_tiles, scratch);
  const RowNormalizer normalizer = NormalizerOf(sums);
  if (params.extremes != nullptr) WriteExtremes(params, row, normalizer, scratch);
  RowSums entropy_sums = sums;
  RowNormalizer entropy_normalizer = normalizer;
  if (params.entropy != nullptr && params.entropy_sums != nullptr) {
    entropy_sums =
        SumTiles(params.entropy_sums + row * params.num_tiles, params.num_tiles, scratch);
    entropy_normalizer = NormalizerOf(entropy_sums);
  }
  if (threadIdx.x != 0) return;
  params.normalizers[row] = normalizer;
  params.nonfinite[row] = normalizer.finite ? 0 : 1;
  if (params.logprob != nullptr) {
    params.logprob[row] = LogprobOf(params.target_logits[row], params.log2_scales[row], normalizer);
  }
  if (params.entropy != nullptr) {
    params.entropy[row] =
        normalizer.finite ? EntropyOf(entropy_sums, entropy_normalizer, params.vocab_size) : NAN;
  }
  if (params.lse != nullptr) params.lse[row] = LseOf(normalizer);
  if (params.sum_p_squared != nullptr) {
    params.sum_p_squared[row] = SumPSquaredOf(sums, normalizer);
  }
}

}  // namespace

cudaError_t LaunchRowScores(const RowScoresParams& params, cudaStream_t stream) {
  const bool asks_extremes = params.argmax_id != nullptr || params.argmax_logprob != nullptr ||
                             params.max_logit != nullptr || params.min_logit != nullptr;
  if (params.num_rows < 0 || params.num_rows > INT32_MAX || params.num_tiles < 1 ||
      params.num_tiles != NumTiles(params.vocab_size) || params.vocab_size > (1 << 20) ||
      params.sums == nullptr || params.log2_scales == nullptr || params.normalizers == nullptr ||
      params.nonfinite == nullptr || (asks_extremes && params.extremes == nullptr) ||
      (params.logprob != nullptr && params.target_logits == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  RowScoresKernel<<<static_cast<uint32_t>(params.num_rows), kBlockThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
