// TileStatsKernel: one pass over a chunk of fp32 dot products gives the partials of its tiles.
//
// Idea      Eight lanes own a tile, 24 columns a lane, all in registers: the maximum fixes the
//           exponent, then the sums follow. No dot product is read twice, and three butterfly steps
//           finish four tiles of a warp at once.
// Work      A warp takes four consecutive tiles of a row. Lane l of a tile takes the columns
//           32 j + 4 l + {0, 1, 2, 3}, j = 0..5.
// Traffic   Reads 4 bytes a logit, writes 16 (with extremes 28) a tile: memory bound.
// Numerics  fp32. y - k is one fma; 2^x is ex2.approx (2 ulp). The order of additions is fixed by
//           the lane's columns and the butterfly, and no fma is left to the compiler, so S and W
//           have the same bits in every instance of the template. -inf adds exactly 0: the exponent
//           is held above -200, where 2^x is already 0. NaN reaches the tile's maximum.
// Limits    Compute capability 8.0 (max.NaN). 2^24 rows, 2^20 columns.
// Source    Our own; the exponents by tile follow kernels/common/tile.h.

#include <climits>
#include <cstdint>

#include "kernels/chunked/logit_chunk.cuh"
#include "kernels/chunked/tile_stats.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 256;
constexpr int kWarpThreads = 32;
constexpr int kBlockWarps = kBlockThreads / kWarpThreads;
constexpr int kTileLanes = 8;
constexpr int kWarpTiles = kWarpThreads / kTileLanes;
constexpr int kLaneColumns = kTileColumns / kTileLanes;  // 24
constexpr int kVectorColumns = 4;
constexpr int kLaneVectors = kLaneColumns / kVectorColumns;  // 6
constexpr int kStepColumns = kTileLanes * kVectorColumns;    // 32
constexpr float kExponentFloor = -200.0F;
constexpr unsigned kFullWarp = 0xFFFFFFFFU;

static_assert(kTileColumns == kTileLanes * kLaneColumns && kLaneColumns % kVectorColumns == 0);

/// The larger, or NaN if either is.
__device__ __forceinline__ float MaxOrNan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Sum over a tile's eight lanes; every lane gets the same bits.
__device__ __forceinline__ float TileSum(float value) {
#pragma unroll
  for (int mask = 1; mask < kTileLanes; mask *= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(kFullWarp, value, mask));
  }
  return value;
}

/// Column within the tile of a lane's i-th value.
__device__ __forceinline__ int TileColumn(int lane, int i) {
  return i / kVectorColumns * kStepColumns + lane * kVectorColumns + i % kVectorColumns;
}

template <bool kSquares>
__device__ __forceinline__ TileSums SumsOf(const float (&z)[kLaneColumns], float max_logit,
                                           float log2_scale) {
  const int32_t exponent = TileExponent(max_logit, log2_scale);
  const bool is_real = exponent != kEmptyExponent && exponent != kNonfiniteExponent;
  const float k = is_real ? static_cast<float>(exponent) : 0.0F;
  // Two chains each, even and odd columns, for instruction-level parallelism.
  float sum[2] = {0.0F, 0.0F};
  float weighted[2] = {0.0F, 0.0F};
  float squares[2] = {0.0F, 0.0F};
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    const float shifted = fmaxf(__fmaf_rn(z[i], log2_scale, -k), kExponentFloor);
    const float power = Exp2(shifted);
    sum[i % 2] = __fadd_rn(sum[i % 2], power);
    weighted[i % 2] = __fmaf_rn(shifted, power, weighted[i % 2]);
    if constexpr (kSquares) squares[i % 2] = __fmaf_rn(power, power, squares[i % 2]);
  }
  TileSums sums;
  sums.exponent = exponent;
  sums.sum = TileSum(__fadd_rn(sum[0], sum[1]));
  sums.weighted = TileSum(__fadd_rn(weighted[0], weighted[1]));
  sums.sum_squares = 0.0F;
  if constexpr (kSquares) sums.sum_squares = TileSum(__fadd_rn(squares[0], squares[1]));
  if (!is_real) sums.sum = sums.weighted = sums.sum_squares = 0.0F;
  return sums;
}

__device__ __forceinline__ void Store(TileSums* out, const TileSums& sums) {
  *reinterpret_cast<float4*>(out) =
      make_float4(__int_as_float(sums.exponent), sums.sum, sums.weighted, sums.sum_squares);
}

template <bool kTransform, bool kExtremes, bool kSquares, bool kEntropy>
__global__ void __launch_bounds__(kBlockThreads)
    TileStatsKernel(const TileStatsParams params, const uint32_t row_warps) {
  const LogitChunk& chunk = params.chunk;
  const uint32_t warp = blockIdx.x * kBlockWarps + threadIdx.x / kWarpThreads;
  const int64_t row = warp / row_warps;
  if (row >= chunk.num_rows) return;  // a whole warp
  const int warp_lane = static_cast<int>(threadIdx.x % kWarpThreads);
  const int lane = warp_lane % kTileLanes;
  const int64_t tile = static_cast<int64_t>(warp % row_warps) * kWarpTiles + warp_lane / kTileLanes;
  const bool has_tile = tile < chunk.num_tiles;  // all lanes stay for the butterflies
  const int64_t first_column = (has_tile ? tile : 0) * kTileColumns;
  const int64_t vocab_column = chunk.tile_begin * kTileColumns + first_column;

  float z[kLaneColumns];
  const float* dots = chunk.dots + row * chunk.row_stride + first_column;
#pragma unroll
  for (int vector = 0; vector < kLaneVectors; ++vector) {
    const float4 dot =
        __ldcs(reinterpret_cast<const float4*>(dots + TileColumn(lane, vector * kVectorColumns)));
    z[vector * kVectorColumns] = dot.x;
    z[vector * kVectorColumns + 1] = dot.y;
    z[vector * kVectorColumns + 2] = dot.z;
    z[vector * kVectorColumns + 3] = dot.w;
  }
  if constexpr (kTransform) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      const float bias =
          chunk.bias == nullptr ? 0.0F : chunk.bias[vocab_column + TileColumn(lane, i)];
      z[i] = LogitOf(z[i], bias, chunk.transform);
    }
  }
  const int64_t valid_columns = chunk.vocab_size - vocab_column;
  if (valid_columns < kTileColumns) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      if (TileColumn(lane, i) >= valid_columns) z[i] = -INFINITY;
    }
  }

  float max_logit = z[0];
#pragma unroll
  for (int i = 1; i < kLaneColumns; ++i) max_logit = MaxOrNan(max_logit, z[i]);
#pragma unroll
  for (int mask = 1; mask < kTileLanes; mask *= 2) {
    max_logit = MaxOrNan(max_logit, __shfl_xor_sync(kFullWarp, max_logit, mask));
  }

  const int64_t partial = row * params.partial_stride + chunk.tile_begin + tile;
  const bool writes = has_tile && lane == 0;
  const TileSums sums = SumsOf<kSquares>(z, max_logit, params.log2_scales[row]);
  if (writes) Store(params.sums + partial, sums);
  if constexpr (kEntropy) {
    const TileSums entropy_sums = SumsOf<false>(z, max_logit, params.entropy_log2_scales[row]);
    if (writes) Store(params.entropy_sums + partial, entropy_sums);
  }
  if constexpr (kExtremes) {
    int32_t argmax = INT_MAX;
    float min_logit = INFINITY;
#pragma unroll
    for (int i = kLaneColumns - 1; i >= 0; --i) {
      const int column = TileColumn(lane, i);
      if (z[i] == max_logit) argmax = column;
      if (column < valid_columns) min_logit = fminf(min_logit, z[i]);
    }
#pragma unroll
    for (int mask = 1; mask < kTileLanes; mask *= 2) {
      argmax = min(argmax, __shfl_xor_sync(kFullWarp, argmax, mask));
      min_logit = fminf(min_logit, __shfl_xor_sync(kFullWarp, min_logit, mask));
    }
    if (writes) {
      params.extremes[partial] = {max_logit, min_logit,
                                  static_cast<int32_t>(vocab_column) + argmax};
    }
  }
  if (writes) {
    const int64_t column = params.targets[row] - vocab_column;
    if (column >= 0 && column < kTileColumns) {
      params.target_logits[row] = LogitAt<kTransform>(chunk, row, first_column + column);
    }
  }
}

template <bool kTransform, bool kExtremes, bool kSquares, bool kEntropy>
cudaError_t Launch(const TileStatsParams& params, cudaStream_t stream) {
  const int64_t row_warps = (params.chunk.num_tiles + kWarpTiles - 1) / kWarpTiles;
  const int64_t blocks = (params.chunk.num_rows * row_warps + kBlockWarps - 1) / kBlockWarps;
  TileStatsKernel<kTransform, kExtremes, kSquares, kEntropy>
      <<<static_cast<uint32_t>(blocks), kBlockThreads, 0, stream>>>(
          params, static_cast<uint32_t>(row_warps));
  return cudaGetLastError();
}

template <bool... kFlags>
cudaError_t Dispatch(const TileStatsParams& params, cudaStream_t stream) {
  if constexpr (sizeof...(kFlags) == 4) {
    return Launch<kFlags...>(params, stream);
  } else {
    const bool flags[4] = {HasTransform(params.chunk), params.extremes != nullptr,
                           params.wants_sum_squares, params.entropy_sums != nullptr};
    return flags[sizeof...(kFlags)] ? Dispatch<kFlags..., true>(params, stream)
                                    : Dispatch<kFlags..., false>(params, stream);
  }
}

}  // namespace

cudaError_t LaunchTileStats(const TileStatsParams& params, cudaStream_t stream) {
  const LogitChunk& chunk = params.chunk;
  const int64_t row_warps = (chunk.num_tiles + kWarpTiles - 1) / kWarpTiles;
  if (!IsValid(chunk) || params.log2_scales == nullptr || params.targets == nullptr ||
      params.target_logits == nullptr || params.sums == nullptr ||
      (params.entropy_sums == nullptr) != (params.entropy_log2_scales == nullptr) ||
      params.partial_stride < chunk.tile_begin + chunk.num_tiles ||
      chunk.num_rows * row_warps > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  return chunk.num_rows == 0 ? cudaSuccess : Dispatch<>(params, stream);
}

cudaError_t ProbeTileStats() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, TileStatsKernel<false, false, false, false>);
}

}  // namespace logprobd::kernels
