// The kernels that read a chunk of fp32 dot products: TileStatsKernel, TopKKernel and
// GatherLogitsKernel; GatherWeightKernel and TargetLogitsKernel, which compute the logits of
// targets before the first chunk.
//
// TileStatsKernel: computes the partials of every (row, tile) of a chunk.
//
// Idea      Eight lanes own one tile of a row; each lane has one chain of 24 columns in registers.
//           The maximum determines the exponent; the sums are computed after it. Every dot product
//           is read once, and three butterfly steps finish four rows of a warp at the same time.
// Work      A warp processes one tile of four consecutive rows. Lane l of a row owns columns
//           8 j + l, j = 0..23.
// Traffic   Reads 4 bytes per logit in whole sectors and writes 16 bytes per tile: memory bound.
// Numerics  See kernels/common/tile_sums.cuh. The order of additions is that of the fused kernel,
//           so the results are bit-identical. A logit of -inf adds exactly 0. NaN propagates to the
//           tile's maximum.
// Limits    Compute capability 8.0 (max.NaN), 2^24 rows, 2^20 columns.
// Source    Our own; exponents per tile follow kernels/common/tile.h.
//
// TopKKernel: merges a chunk into the running top-k of each row.
//
// Idea      See kernels/common/top_k.cuh.
// Work      One block per row, four columns per thread and step.
// Traffic   Reads 4 bytes per logit; reads and writes 8 k bytes per row and chunk.
// Numerics  Exact.
// Limits    k <= kTopKMax.
// Source    Our own.
//
// GatherLogitsKernel: looks up the logits of listed (row, id) pairs in a chunk.
//
// Idea      The next chunk overwrites this one, so the logits of the pairs are copied from each
//           chunk.
// Work      One thread per pair.
// Traffic   Reads 8 bytes per pair and chunk, and one sector for each pair that the chunk holds.
// Numerics  Logits are bit-identical to those that the other kernels use.
// Limits    2^31 - 1 pairs per launch.
// Source    Our own.
//
// GatherWeightKernel, TargetLogitsKernel: compute the logits of the targets of some rows.
//
// Idea      A rank is the number of logits above the target's, so that logit must be known before
//           the chunks are read. The GEMM multiplies the rows by the weight rows of their targets;
//           the diagonal of the product has the bits that the target has in its chunk.
// Work      One block per weight row, 16 bytes per thread and step; one thread per target logit.
// Traffic   Reads and writes one weight row per target.
// Numerics  Copies bits; logits are computed as in the other kernels.
// Limits    2^24 rows per launch.
// Source    Our own.

#include <climits>
#include <cstdint>

#include "kernels/chunked/logit_chunk.h"
#include "kernels/common/tile_sums.cuh"
#include "kernels/common/top_k.cuh"

namespace logprobd::kernels {
namespace {

/// Returns the number of columns of the chunk that lie in the vocabulary.
int64_t ValidColumns(const LogitChunk& chunk) {
  const int64_t begin = chunk.tile_begin * kTileColumns;
  const int64_t columns = chunk.num_tiles * kTileColumns;
  return chunk.vocab_size - begin < columns ? chunk.vocab_size - begin : columns;
}

bool IsValid(const LogitChunk& chunk) {
  return chunk.dots != nullptr && chunk.num_rows >= 0 && chunk.num_rows <= (1 << 24) &&
         chunk.tile_begin >= 0 && chunk.num_tiles >= 1 && chunk.row_stride % 4 == 0 &&
         chunk.row_stride >= chunk.num_tiles * kTileColumns && chunk.vocab_size >= 1 &&
         (chunk.tile_begin + chunk.num_tiles - 1) * kTileColumns < chunk.vocab_size;
}

bool HasTransform(const LogitChunk& chunk) {
  return chunk.bias != nullptr || !chunk.transform.IsIdentity();
}

/// Returns the logit of a valid column, counted from the chunk's first.
template <bool kTransform>
__device__ __forceinline__ float LogitAt(const LogitChunk& chunk, int64_t row, int64_t column) {
  const float dot = chunk.dots[row * chunk.row_stride + column];
  if constexpr (!kTransform) return dot;
  const float bias =
      chunk.bias == nullptr ? 0.0F : chunk.bias[chunk.tile_begin * kTileColumns + column];
  return LogitOf(dot, bias, chunk.transform);
}

constexpr int kBlockThreads = 256;
constexpr int kWarpThreads = 32;
constexpr int kBlockWarps = kBlockThreads / kWarpThreads;
constexpr int kWarpRows = kWarpThreads / kTileChains;
constexpr unsigned kFullWarp = 0xFFFFFFFFU;

/// Returns the sums of the tile, which are bit-identical in all of its eight lanes.
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
  if (tile >= chunk.num_tiles) return;  // the whole warp returns
  const int warp_lane = static_cast<int>(threadIdx.x % kWarpThreads);
  const int lane = warp_lane % kTileChains;
  const int64_t row = static_cast<int64_t>(warp % row_groups) * kWarpRows + warp_lane / kTileChains;
  const bool has_row = row < chunk.num_rows;  // all lanes take part in the butterflies
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
  if (params.rank_counts != nullptr) {
    const float target_logit = params.target_logits[some_row];
    const auto target = static_cast<int32_t>(params.targets[some_row] - vocab_column);
    int32_t count = 0;
#pragma unroll
    for (int i = 0; i < kChainColumns; ++i) {
      count += RanksAbove(z[i], i * kTileChains, target_logit, target) ? 1 : 0;
    }
#pragma unroll
    for (int mask = 1; mask < kTileChains; mask *= 2) {
      count += __shfl_xor_sync(kFullWarp, count, mask);
    }
    if (writes && count > 0) atomicAdd(params.rank_counts + row, count);
  }
  if (writes) {
    const int64_t column = params.targets[row] - vocab_tile * kTileColumns;
    if (column >= 0 && column < kTileColumns && params.targets[row] < chunk.vocab_size) {
      params.target_logits[row] = LogitAt<kTransform>(chunk, row, tile * kTileColumns + column);
    }
  }
}

/// Returns the number of warps per tile.
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

/// A row of a chunk, as a source of FindTopK.
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
           /*from_best=*/true, params.keys + row * params.top_k);
}

__global__ void __launch_bounds__(kBlockThreads)
    GatherLogitsKernel(const GatherLogitsParams params, const int64_t valid_columns) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (i >= params.count) return;
  const int64_t row = static_cast<int64_t>(params.rows[i]) - params.row_begin;
  const int64_t column = params.ids[i] - params.chunk.tile_begin * kTileColumns;
  if (row < 0 || row >= params.chunk.num_rows || column < 0 || column >= valid_columns) return;
  params.logits[i] = LogitAt<true>(params.chunk, row, column);
}

__device__ __forceinline__ bool Holds(const ShardTargets& shard, int32_t target) {
  return target >= shard.column_begin && target < shard.column_end;
}

__global__ void __launch_bounds__(kBlockThreads)
    GatherWeightKernel(const ShardTargets shard, const uint4* weight, const int64_t row_vectors,
                       uint4* out) {
  const int64_t row = blockIdx.x;
  const int32_t target = shard.targets[row];
  const int64_t column = Holds(shard, target) ? target - shard.column_begin : 0;
  for (int64_t i = threadIdx.x; i < row_vectors; i += kBlockThreads) {
    out[row * row_vectors + i] = weight[column * row_vectors + i];
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    TargetLogitsKernel(const TargetLogitsParams params) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (row >= params.targets.num_rows) return;
  const int32_t target = params.targets.targets[row];
  if (!Holds(params.targets, target)) return;
  const float bias = params.bias == nullptr ? 0.0F : params.bias[target];
  const float dot = params.dots[row * params.row_stride + row];
  params.logits[row] = LogitOf(dot, bias, params.transform);
}

bool IsValid(const ShardTargets& shard) {
  return shard.targets != nullptr && shard.num_rows >= 0 && shard.num_rows <= (1 << 24) &&
         shard.column_begin >= 0 && shard.column_begin < shard.column_end;
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
  whole.sums = IndexedByVocabularyTile(params.sums, params.tile_origin, params.layout.tile_stride);
  whole.entropy_sums =
      IndexedByVocabularyTile(params.entropy_sums, params.tile_origin, params.layout.tile_stride);
  return Dispatch<>(whole, stream);
}

cudaError_t ProbeTileStats() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, TileStatsKernel<false, false, false>);
}

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

cudaError_t LaunchGatherWeight(const ShardTargets& targets, const void* weight, int64_t row_bytes,
                               void* out, cudaStream_t stream) {
  constexpr int64_t kVectorBytes = sizeof(uint4);
  if (!IsValid(targets) || weight == nullptr || out == nullptr || row_bytes < kVectorBytes ||
      row_bytes % kVectorBytes != 0) {
    return cudaErrorInvalidValue;
  }
  if (targets.num_rows == 0) return cudaSuccess;
  GatherWeightKernel<<<static_cast<uint32_t>(targets.num_rows), kBlockThreads, 0, stream>>>(
      targets, static_cast<const uint4*>(weight), row_bytes / kVectorBytes,
      static_cast<uint4*>(out));
  return cudaGetLastError();
}

cudaError_t LaunchTargetLogits(const TargetLogitsParams& params, cudaStream_t stream) {
  if (!IsValid(params.targets) || params.dots == nullptr || params.logits == nullptr ||
      params.row_stride < params.targets.num_rows) {
    return cudaErrorInvalidValue;
  }
  if (params.targets.num_rows == 0) return cudaSuccess;
  const int64_t blocks = (params.targets.num_rows + kBlockThreads - 1) / kBlockThreads;
  TargetLogitsKernel<<<static_cast<uint32_t>(blocks), kBlockThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
