// CachedGradientsKernel: turns cached exponentials 2^(y - k) into gradients of the dot products.
//
// Idea      p = 2^(y - k) 2^(k - K), where K is the row's log2 of the sum: one 2^x per tile. The
//           gradient of the entropy needs ln p, which is the logarithm of the cached value.
// Work      One block per 32 tiles of a row. A thread processes eight consecutive columns of four
//           tiles and loads all of them first. It tests once per eight columns for the rare cases:
//           the target, the largest logit, a cap.
// Traffic   Reads 2 bytes and writes 2 bytes per column; the kernel is memory bound.
// Numerics  fp32, from exponentials that were rounded to bf16 (up to 2^-8 relative). The target and
//           the largest logit are taken from fp32. An exponential of 0 has the gradient 0; NaN
//           stays NaN.
// Limits    2^31 - 1 rows.
// Source    Our own.

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/common/device_math.cuh"
#include "kernels/common/tile.h"
#include "kernels/row_ops/cached_gradients.h"

namespace logprobd::kernels {
namespace {

constexpr int kVector = 8;  // columns, 16 bytes
constexpr int kTileVectors = kTileColumns / kVector;
constexpr int kTilesAtOnce = 8;
constexpr int kBlockThreads = kTilesAtOnce * kTileVectors;
constexpr int kThreadTiles = 4;
constexpr int kBlockTiles = kThreadTiles * kTilesAtOnce;

__device__ __forceinline__ float Log2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Scale of a tile's exponentials relative to the row's sum.
struct TileOffset {
  float exponent;  // k - K
  float factor;    // 2^(k - K)
};

/// Returns the gradient for a cached exponential, in the common case.
__device__ __forceinline__ float GradientOf(const RowGradient& row, float exponential,
                                            const TileOffset& tile) {
  const float exponent =
      MaxOrNan(__fadd_rn(Log2(exponential), tile.exponent), kGradientExponentMin);
  return __fmul_rn(__fmul_rn(exponential, tile.factor),
                   __fmaf_rn(row.weighted, exponent, row.free));
}

/// Returns the gradient for a cached exponential of a head with or without a cap. The gradients of
/// the target and of the largest logit are computed from their fp32 logits instead.
__device__ __forceinline__ float RareGradientOf(const RowGradient& row, float exponential,
                                                const TileOffset& tile, int32_t column,
                                                float reciprocal_cap) {
  float exponent = MaxOrNan(__fadd_rn(Log2(exponential), tile.exponent), kGradientExponentMin);
  float p = __fmul_rn(exponential, tile.factor);
  const bool is_target = column == row.target_column;
  if (is_target || column == row.max_column) {
    exponent = MaxOrNan(is_target ? row.target_exponent : row.max_exponent, kGradientExponentMin);
    p = Exp2(exponent);
  }
  float gradient = __fmul_rn(p, __fmaf_rn(row.weighted, exponent, row.free));
  if (is_target) gradient = __fadd_rn(gradient, row.target);
  if (reciprocal_cap > 0.0F && gradient != 0.0F) {
    // The target's logit is used without the floor, which only the exponential needs.
    const float y = __fadd_rn(is_target ? row.target_exponent : exponent, row.log2_sum);
    const float logit = __fdividef(y, row.log2_scale);
    const float share = __fmul_rn(logit, reciprocal_cap);
    gradient = __fmul_rn(gradient, __fmaf_rn(-share, share, 1.0F));
  }
  return gradient;
}

/// Low and High return the two bf16 values of a word as fp32.
__device__ __forceinline__ float Low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float High(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000U); }

/// Returns the gradients of eight consecutive columns, starting with `column`.
template <class Element>
__device__ __forceinline__ uint4 VectorGradient(const RowGradient& row, const uint4& words,
                                                const TileOffset& tile, int32_t column,
                                                float reciprocal_cap) {
  const uint32_t pairs[] = {words.x, words.y, words.z, words.w};
  uint32_t out[4];
  const auto has = [&](int32_t other) {
    return static_cast<uint32_t>(other - column) < static_cast<uint32_t>(kVector);
  };
  if (reciprocal_cap > 0.0F || has(row.target_column) || has(row.max_column)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = PackPair<Element>(
          RareGradientOf(row, Low(pairs[i]), tile, column + 2 * i, reciprocal_cap),
          RareGradientOf(row, High(pairs[i]), tile, column + 2 * i + 1, reciprocal_cap));
    }
  } else if (row.weighted == 0.0F) {
    const float factor = __fmul_rn(tile.factor, row.free);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] =
          PackPair<Element>(__fmul_rn(Low(pairs[i]), factor), __fmul_rn(High(pairs[i]), factor));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = PackPair<Element>(GradientOf(row, Low(pairs[i]), tile),
                                 GradientOf(row, High(pairs[i]), tile));
    }
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

template <class Element>
__global__ void __launch_bounds__(kBlockThreads)
    CachedGradientsKernel(const CachedGradientsParams params) {
  const int64_t i = blockIdx.y + static_cast<int64_t>(gridDim.y) * blockIdx.z;
  if (i >= params.num_rows || (params.row_count != nullptr && i >= *params.row_count)) return;
  const int64_t cached_row = params.cached_rows == nullptr ? i : params.cached_rows[i];
  const int32_t* const exponents = params.exponents + cached_row * params.exponent_stride;
  const int in_tile = static_cast<int>(threadIdx.x) % kTileVectors * kVector;
  const int64_t first_tile = params.tile_begin + static_cast<int64_t>(blockIdx.x) * kBlockTiles +
                             threadIdx.x / kTileVectors;
  uint4 words[kThreadTiles];
  int32_t tile_exponents[kThreadTiles];
#pragma unroll
  for (int part = 0; part < kThreadTiles; ++part) {
    const int64_t tile = first_tile + part * kTilesAtOnce;
    if (tile >= params.tile_end) continue;
    const int64_t offset = (cached_row * params.row_tiles + tile) * kTileColumns + in_tile;
    words[part] = __ldcs(reinterpret_cast<const uint4*>(params.exponentials + offset));
    tile_exponents[part] = exponents[tile];
  }
  const RowGradient row = params.rows[i];
  const float reciprocal_cap = params.softcap > 0.0F ? 1.0F / params.softcap : 0.0F;
  auto* const gradients = static_cast<uint16_t*>(params.gradients) + i * params.gradient_stride;
#pragma unroll
  for (int part = 0; part < kThreadTiles; ++part) {
    const int64_t tile = first_tile + part * kTilesAtOnce;
    if (tile >= params.tile_end) continue;
    TileOffset tile_offset;
    tile_offset.exponent = static_cast<float>(tile_exponents[part]) - row.log2_sum;
    tile_offset.factor = Exp2(tile_offset.exponent);
    const auto column = static_cast<int32_t>(tile * kTileColumns + in_tile);
    const int64_t offset = (tile - params.tile_begin) * kTileColumns + in_tile;
    *reinterpret_cast<uint4*>(gradients + offset) =
        VectorGradient<Element>(row, words[part], tile_offset, column, reciprocal_cap);
  }
}

}  // namespace

cudaError_t LaunchCachedGradients(const CachedGradientsParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  const auto is_aligned = [](const void* pointer) {
    return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  };
  const int64_t num_tiles = params.tile_end - params.tile_begin;
  if (params.num_rows < 0 || params.num_rows > INT32_MAX || !is_aligned(params.exponentials) ||
      params.exponents == nullptr || !is_aligned(params.rows) || !is_aligned(params.gradients) ||
      params.tile_begin < 0 || num_tiles < 1 || params.tile_end > params.row_tiles ||
      params.gradient_stride < num_tiles * kTileColumns || params.gradient_stride % kVector != 0 ||
      params.dtype == Dtype::kF32) {
    return cudaErrorInvalidValue;
  }
  constexpr int64_t kGridRowsMax = 65'535;
  const int64_t planes = (params.num_rows + kGridRowsMax - 1) / kGridRowsMax;
  const int64_t plane_rows = (params.num_rows + planes - 1) / planes;
  const dim3 grid(static_cast<uint32_t>((num_tiles + kBlockTiles - 1) / kBlockTiles),
                  static_cast<uint32_t>(plane_rows), static_cast<uint32_t>(planes));
  const auto kernel = params.dtype == Dtype::kBf16 ? CachedGradientsKernel<__nv_bfloat16>
                                                   : CachedGradientsKernel<__half>;
  CachedGradientsParams strided = params;
  if (strided.exponent_stride == 0) strided.exponent_stride = params.row_tiles;
  kernel<<<grid, kBlockThreads, 0, stream>>>(strided);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
