// TileStatsKernel: one pass over a chunk of fp32 dot products gives the partials of its tiles.
//
// Idea      Eight lanes own a tile of a row, a chain of 24 columns a lane, all in registers: the
//           maximum fixes the exponent, then the sums follow. No dot product is read twice, and
//           three butterfly steps finish four rows of a warp at once.
// Work      A warp takes a tile of four consecutive rows. Lane l of a row takes the columns
//           8 j + l, j = 0..23.
// Traffic   Reads 4 bytes a logit, whole sectors, writes 16 a tile: memory bound.
// Numerics  kernels/common/tile_sums.cuh: the order and with it the bits of the fused kernel. -inf
//           adds exactly 0. NaN reaches the tile's maximum.
// Limits    Compute capability 8.0 (max.NaN). 2^24 rows, 2^20 columns.
// Source    Our own; the exponents by tile follow kernels/common/tile.h.

#include <climits>
#include <cstdint>

#include "kernels/chunked/logit_chunk.cuh"
#include "kernels/chunked/tile_stats.h"
#include "kernels/common/logit_key.h"
#include "kernels/common/tile_sums.cuh"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 256;
constexpr int kWarpThreads = 32;
constexpr int kBlockWarps = kBlockThreads / kWarpThreads;
constexpr int kWarpRows = kWarpThreads / kTileChains;
constexpr unsigned kFullWarp = 0xFFFFFFFFU;

/// The tile's sums, the same in its eight lanes.
template <bool kSquares>
__device__ __forceinline__ ChainSums SumsOf(const float (&z)[kChainColumns],
                                            const TileOrigin& origin, float log2_scale) {
  ChainSums sums;
#pragma unroll
  for (int i = 0; i < kChainColumns; ++i) sums.Add<kSquares, true>(z[i], log2_scale, origin.k);
#pragma unroll
  for (int mask = 1; mask < kTileChains; mask *= 2) JoinLanes<kSquares>(sums, mask);
  return sums;
}

template <bool kTransform, bool kSquares, bool kEntropy>
__global__ void __launch_bounds__(kBlockThreads)
    TileStatsKernel(const TileStatsParams params, const uint32_t row_groups) {
  const LogitChunk& chunk = params.chunk;
  const uint32_t warp = blockIdx.x * kBlockWarps + threadIdx.x / kWarpThreads;
  const int64_t tile = warp / row_groups;
  if (tile >= chunk.num_tiles) return;  // a whole warp
  const int warp_lane = static_cast<int>(threadIdx.x % kWarpThreads);
  const int lane = warp_lane % kTileChains;
  const int64_t row = static_cast<int64_t>(warp % row_groups) * kWarpRows + warp_lane / kTileChains;
  const bool has_row = row < chunk.num_rows;  // all lanes stay for the butterflies
  const int64_t some_row = has_row ? row : chunk.num_rows - 1;
  const int64_t first_column = tile * kTileColumns + lane;
  const int64_t vocab_tile = chunk.tile_begin + tile;
  const int64_t vocab_column = vocab_tile * kTileColumns + lane;

  float z[kChainColumns];
  const float* dots = chunk.dots + some_row * chunk.row_stride + first_column;
#pragma unroll
  for (int i = 0; i < kChainColumns; ++i) z[i] = __ldcs(dots + i * kTileChains);
  if constexpr (kTransform) {
#pragma unroll
    for (int i = 0; i < kChainColumns; ++i) {
      const float bias = chunk.bias == nullptr ? 0.0F : chunk.bias[vocab_column + i * kTileChains];
      z[i] = LogitOf(z[i], bias, chunk.transform);
    }
  }
  if ((vocab_tile + 1) * kTileColumns > chunk.vocab_size) {
#pragma unroll
    for (int i = 0; i < kChainColumns; ++i) {
      if (vocab_column + i * kTileChains >= chunk.vocab_size) z[i] = -INFINITY;
    }
  }

  float max_logit = z[0];
#pragma unroll
  for (int i = 1; i < kChainColumns; ++i) max_logit = MaxOrNan(max_logit, z[i]);
#pragma unroll
  for (int mask = 1; mask < kTileChains; mask *= 2) {
    max_logit = MaxOrNan(max_logit, __shfl_xor_sync(kFullWarp, max_logit, mask));
  }

  const int64_t partial = params.layout.At(row, vocab_tile);
  const bool writes = has_row && lane == 0;
  const float log2_scale = params.log2_scales[some_row];
  const TileOrigin origin = TileOriginOf(max_logit, log2_scale);
  const ChainSums sums = SumsOf<kSquares>(z, origin, log2_scale);
  if (writes) StoreTileSums(params.sums + partial, origin, sums);
  if constexpr (kEntropy) {
    const float entropy_scale = params.entropy_log2_scales[some_row];
    const TileOrigin entropy_origin = TileOriginOf(max_logit, entropy_scale);
    const ChainSums entropy_sums = SumsOf<false>(z, entropy_origin, entropy_scale);
    if (writes) StoreTileSums(params.entropy_sums + partial, entropy_origin, entropy_sums);
  }
  if (params.max_keys != nullptr) {
    int32_t argmax = INT_MAX;
#pragma unroll
    for (int i = kChainColumns - 1; i >= 0; --i) {
      if (z[i] == max_logit) argmax = static_cast<int32_t>(vocab_column) + i * kTileChains;
    }
#pragma unroll
    for (int mask = 1; mask < kTileChains; mask *= 2) {
      argmax = min(argmax, __shfl_xor_sync(kFullWarp, argmax, mask));
    }
    if (writes) {
      atomicMax(reinterpret_cast<unsigned long long*>(params.max_keys + row),
                LogitKey(max_logit, argmax));
    }
  }
  if (params.min_keys != nullptr) {
    float min_logit = INFINITY;
#pragma unroll
    for (int i = 0; i < kChainColumns; ++i) {
      if (vocab_column + i * kTileChains < chunk.vocab_size) min_logit = fminf(min_logit, z[i]);
    }
#pragma unroll
    for (int mask = 1; mask < kTileChains; mask *= 2) {
      min_logit = fminf(min_logit, __shfl_xor_sync(kFullWarp, min_logit, mask));
    }
    if (writes) atomicMax(params.min_keys + row, ~OrderedBits(min_logit));
  }
  if (writes) {
    const int64_t column = params.targets[row] - vocab_tile * kTileColumns;
    if (column >= 0 && column < kTileColumns && params.targets[row] < chunk.vocab_size) {
      params.target_logits[row] = LogitAt<kTransform>(chunk, row, tile * kTileColumns + column);
    }
  }
}

/// Warps that the rows of one tile take.
int64_t RowGroups(const LogitChunk& chunk) { return (chunk.num_rows + kWarpRows - 1) / kWarpRows; }

template <bool kTransform, bool kSquares, bool kEntropy>
cudaError_t Launch(const TileStatsParams& params, cudaStream_t stream) {
  const int64_t row_groups = RowGroups(params.chunk);
  const int64_t blocks = (params.chunk.num_tiles * row_groups + kBlockWarps - 1) / kBlockWarps;
  TileStatsKernel<kTransform, kSquares, kEntropy>
      <<<static_cast<uint32_t>(blocks), kBlockThreads, 0, stream>>>(
          params, static_cast<uint32_t>(row_groups));
  return cudaGetLastError();
}

template <bool... kFlags>
cudaError_t Dispatch(const TileStatsParams& params, cudaStream_t stream) {
  if constexpr (sizeof...(kFlags) == 3) {
    return Launch<kFlags...>(params, stream);
  } else {
    const bool flags[3] = {HasTransform(params.chunk), params.wants_sum_squares,
                           params.entropy_sums != nullptr};
    return flags[sizeof...(kFlags)] ? Dispatch<kFlags..., true>(params, stream)
                                    : Dispatch<kFlags..., false>(params, stream);
  }
}

}  // namespace

cudaError_t LaunchTileStats(const TileStatsParams& params, cudaStream_t stream) {
  const LogitChunk& chunk = params.chunk;
  if (!IsValid(chunk) || params.tile_origin < 0 || chunk.tile_begin < params.tile_origin ||
      params.log2_scales == nullptr || params.targets == nullptr ||
      params.target_logits == nullptr || params.sums == nullptr ||
      (params.entropy_sums == nullptr) != (params.entropy_log2_scales == nullptr) ||
      params.layout.row_stride < 1 || params.layout.tile_stride < 1 ||
      chunk.num_tiles * RowGroups(chunk) > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (chunk.num_rows == 0) return cudaSuccess;
  TileStatsParams whole = params;
  whole.tile_origin = 0;
  whole.sums = OfWholeVocabulary(params.sums, params.tile_origin, params.layout.tile_stride);
  whole.entropy_sums =
      OfWholeVocabulary(params.entropy_sums, params.tile_origin, params.layout.tile_stride);
  return Dispatch<>(whole, stream);
}

cudaError_t ProbeTileStats() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, TileStatsKernel<false, false, false>);
}

}  // namespace logprobd::kernels
