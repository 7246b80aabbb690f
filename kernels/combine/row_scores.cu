// RowScoresKernel: tile partials of a row -> its scores.
//
// Idea      First the row's largest exponent over its tiles, then every sum moved to it, quantised
//           once and added as 64-bit integers: integer addition is associative, so the grouping
//           over threads does not show in the bits.
// Work      A block has 256 threads for kRows rows (1 where rows are few, else 4); a thread takes
//           every (256 / kRows)-th tile of its row, eight loads at a time, as latency is what
//           counts.
// Traffic   16 bytes a tile, twice (the second time from a cache), by whole sectors: see
//           PartialLayoutOf.
// Numerics  Exact sums of the partials to 2^-42, relative to the row's exponent; the rest in fp64.
// Limits    V <= 2^20 (row_sums.h).
// Source    Our own; kernels/common/row_sums.h.

#include <cstdint>

#include "kernels/combine/row_scores.h"
#include "kernels/common/logit_key.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 256;
constexpr int kWarpThreads = 32;
constexpr int kBlockWarps = kBlockThreads / kWarpThreads;
constexpr int kRowsOfLargeBatch = 4;
constexpr int kBatch = 8;  // tiles
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

/// Joins the values of the threads of each row; all of them get the result. Thread t has row
/// t % kRows. `scratch` holds kBlockWarps * kRows of T and may be used again at once.
template <int kRows, typename T, typename Operation>
__device__ T RowReduce(T value, const Operation& join, T* scratch) {
#pragma unroll
  for (int mask = kWarpThreads / 2; mask >= kRows; mask /= 2) {
    value = join(value, __shfl_xor_sync(kFullWarp, value, mask));
  }
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int row = static_cast<int>(threadIdx.x) % kRows;
  if (threadIdx.x % kWarpThreads < kRows) scratch[warp * kRows + row] = value;
  __syncthreads();
  value = scratch[row];
#pragma unroll
  for (int other = 1; other < kBlockWarps; ++other) {
    value = join(value, scratch[other * kRows + row]);
  }
  __syncthreads();
  return value;
}

__device__ __forceinline__ TileSums Load(const TileSums* sums) {
  const float4 words = *reinterpret_cast<const float4*>(sums);
  return {__float_as_int(words.x), words.y, words.z, words.w};
}

/// The sums of this thread's row; `sums` is at the row's place in the first tile.
template <int kRows>
__device__ RowSums SumTiles(const TileSums* sums, const RowScoresParams& params, int64_t* scratch) {
  constexpr int kTileThreads = kBlockThreads / kRows;
  const auto first = static_cast<int64_t>(threadIdx.x / kRows);
  const TileSums empty = {kEmptyExponent, 0.0F, 0.0F, 0.0F};
  int32_t exponent = kEmptyExponent;
  for (int64_t begin = first; begin < params.num_tiles; begin += kBatch * kTileThreads) {
    int32_t exponents[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t tile = begin + i * kTileThreads;
      exponents[i] = tile < params.num_tiles ? sums[tile * params.layout.tile_stride].exponent
                                             : kEmptyExponent;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) exponent = Larger()(exponent, exponents[i]);
  }
  RowSums row;
  row.exponent = RowReduce<kRows>(exponent, Larger(), reinterpret_cast<int32_t*>(scratch));
  for (int64_t begin = first; begin < params.num_tiles; begin += kBatch * kTileThreads) {
    TileSums batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t tile = begin + i * kTileThreads;
      batch[i] = tile < params.num_tiles ? Load(sums + tile * params.layout.tile_stride) : empty;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) AddTile(row, batch[i]);
  }
  row.sum = RowReduce<kRows>(row.sum, Add(), scratch);
  row.weighted = RowReduce<kRows>(row.weighted, Add(), scratch);
  if (params.sum_p_squared != nullptr) {
    row.sum_squares = RowReduce<kRows>(row.sum_squares, Add(), scratch);
  }
  return row;
}

__device__ void WriteExtremes(const RowScoresParams& params, int64_t row,
                              const RowNormalizer& normalizer) {
  const bool finite = normalizer.finite;
  if (params.max_keys != nullptr) {
    const LogitEntry best = LogitEntryOf(params.max_keys[row]);
    if (params.argmax_id != nullptr) params.argmax_id[row] = finite ? best.id : -1;
    if (params.argmax_logprob != nullptr) {
      params.argmax_logprob[row] = LogprobOf(best.logit, params.log2_scales[row], normalizer);
    }
    if (params.max_logit != nullptr) {
      params.max_logit[row] = finite ? best.logit * params.logit_correction : NAN;
    }
  }
  if (params.min_logit != nullptr) {
    params.min_logit[row] =
        finite ? FromOrderedBits(~params.min_keys[row]) * params.logit_correction : NAN;
  }
}

template <int kRows>
__global__ void __launch_bounds__(kBlockThreads) RowScoresKernel(const RowScoresParams params) {
  __shared__ int64_t scratch[kBlockWarps * kRows];
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();  // returns at once unless launched beside the partials' kernel
#endif
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x % kRows;
  const int64_t some_row = row < params.num_rows ? row : params.num_rows - 1;
  const RowSums sums =
      SumTiles<kRows>(params.sums + params.layout.At(some_row, 0), params, scratch);
  RowSums entropy_sums = sums;
  const bool has_entropy_sums = params.entropy != nullptr && params.entropy_sums != nullptr;
  if (has_entropy_sums) {
    entropy_sums =
        SumTiles<kRows>(params.entropy_sums + params.layout.At(some_row, 0), params, scratch);
  }
  if (threadIdx.x >= kRows || row >= params.num_rows) return;
  const RowNormalizer normalizer = NormalizerOf(sums);
  params.normalizers[row] = normalizer;
  params.nonfinite[row] = normalizer.finite ? 0 : 1;
  WriteExtremes(params, row, normalizer);
  if (params.logprob != nullptr) {
    params.logprob[row] = LogprobOf(params.target_logits[row], params.log2_scales[row], normalizer);
  }
  if (params.entropy != nullptr) {
    const RowNormalizer entropy_normalizer =
        has_entropy_sums ? NormalizerOf(entropy_sums) : normalizer;
    params.entropy[row] =
        normalizer.finite ? EntropyOf(entropy_sums, entropy_normalizer, params.vocab_size) : NAN;
  }
  if (params.lse != nullptr) params.lse[row] = LseOf(normalizer);
  if (params.sum_p_squared != nullptr) {
    params.sum_p_squared[row] = SumPSquaredOf(sums, normalizer);
  }
}

template <int kRows>
cudaError_t Launch(const RowScoresParams& params, cudaStream_t stream) {
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<uint32_t>((params.num_rows + kRows - 1) / kRows);
  config.blockDim = kBlockThreads;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = params.follows_partials ? 1 : 0;
  return cudaLaunchKernelEx(&config, RowScoresKernel<kRows>, params);
}

}  // namespace

cudaError_t LaunchRowScores(const RowScoresParams& params, cudaStream_t stream) {
  const bool asks_max = params.argmax_id != nullptr || params.argmax_logprob != nullptr ||
                        params.max_logit != nullptr;
  if (params.num_rows == 0) return cudaSuccess;
  if (params.num_rows < 0 || params.num_rows > INT32_MAX || params.num_tiles < 1 ||
      params.num_tiles != NumTiles(params.vocab_size) || params.vocab_size > (1 << 20) ||
      params.layout.row_stride < 1 || params.layout.tile_stride < 1 || params.sums == nullptr ||
      params.log2_scales == nullptr || params.normalizers == nullptr ||
      params.nonfinite == nullptr || (asks_max && params.max_keys == nullptr) ||
      (params.min_logit != nullptr && params.min_keys == nullptr) ||
      (params.logprob != nullptr && params.target_logits == nullptr)) {
    return cudaErrorInvalidValue;
  }
  return params.num_rows <= kRowMajorRowsMax ? Launch<1>(params, stream)
                                             : Launch<kRowsOfLargeBatch>(params, stream);
}

}  // namespace logprobd::kernels
