#pragma once

// Device code that combines the partials of a row and turns the sums into scores. The kernels for
// one GPU and those for shards share this code, so that their results are bit-identical.
//
// Work      A block has 256 threads for kRows rows (1 if there are few rows, else 4). A thread
//           processes every (256 / kRows)-th tile of its row and keeps eight loads in flight,
//           because latency dominates.

#include <cstdint>

#include "kernels/combine/row_scores.h"
#include "kernels/common/logit_key.h"
#include "kernels/common/row_sums.h"

namespace logprobd::kernels::internal {

inline constexpr int kJoinThreads = 256;
inline constexpr int kJoinWarpThreads = 32;
inline constexpr int kJoinWarps = kJoinThreads / kJoinWarpThreads;
inline constexpr int kJoinRowsOfLargeBatch = 4;
inline constexpr int kJoinBatch = 8;  // tiles whose loads are in flight

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

/// Sums of a row that are reduced together: sum, weighted and sum_squares.
inline constexpr int kJoinSums = 3;

/// Number of int64_t of the scratch memory of a block with kRows rows.
template <int kRows>
inline constexpr int kJoinScratch = (kJoinSums * kJoinWarps) * kRows;

/// Reduces kCount values of the threads of each row; all of them get the results. Thread t belongs
/// to row t % kRows. `scratch` holds kCount * kJoinWarps * kRows values and may be reused
/// immediately.
template <int kRows, int kCount, typename T, typename Operation>
__device__ void RowReduce(T (&values)[kCount], const Operation& join, T* scratch) {
  const int warp = static_cast<int>(threadIdx.x) / kJoinWarpThreads;
  const int row = static_cast<int>(threadIdx.x) % kRows;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int mask = kJoinWarpThreads / 2; mask >= kRows; mask /= 2) {
      values[i] = join(values[i], __shfl_xor_sync(0xFFFFFFFFU, values[i], mask));
    }
    if (threadIdx.x % kJoinWarpThreads < kRows) {
      scratch[(i * kJoinWarps + warp) * kRows + row] = values[i];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = scratch[i * kJoinWarps * kRows + row];
#pragma unroll
    for (int other = 1; other < kJoinWarps; ++other) {
      values[i] = join(values[i], scratch[(i * kJoinWarps + other) * kRows + row]);
    }
  }
  __syncthreads();
}

/// The tiles of one row.
struct TilesOfRow {
  const TileSums* sums;  // partial of the row in the first tile
  int64_t tile_stride;
  int64_t num_tiles;
};

__device__ __forceinline__ TileSums LoadTileSums(const TileSums* sums) {
  const float4 words = *reinterpret_cast<const float4*>(sums);
  return {__float_as_int(words.x), words.y, words.z, words.w};
}

/// Returns the largest of the values of the threads of each row.
template <int kRows>
__device__ int32_t RowMaximum(int32_t value, int64_t* scratch) {
  int32_t values[] = {value};
  RowReduce<kRows>(values, Larger(), reinterpret_cast<int32_t*>(scratch));
  return values[0];
}

/// Adds the sums of the threads of each row, the squares only if `wants_sum_squares` is set.
template <int kRows>
__device__ void AddSums(RowSums& row, bool wants_sum_squares, int64_t* scratch) {
  if (wants_sum_squares) {
    int64_t sums[] = {row.sum, row.weighted, row.sum_squares};
    RowReduce<kRows>(sums, Add(), scratch);
    row.sum_squares = sums[2];
    row.weighted = sums[1];
    row.sum = sums[0];
    return;
  }
  int64_t sums[] = {row.sum, row.weighted};
  RowReduce<kRows>(sums, Add(), scratch);
  row.weighted = sums[1];
  row.sum = sums[0];
}

/// Returns the largest exponent of this thread's row. All threads of the block must call it.
template <int kRows>
__device__ int32_t LargestExponent(const TilesOfRow& tiles, int64_t* scratch) {
  constexpr int kTileThreads = kJoinThreads / kRows;
  const auto first = static_cast<int64_t>(threadIdx.x / kRows);
  int32_t exponent = kEmptyExponent;
  for (int64_t begin = first; begin < tiles.num_tiles; begin += kJoinBatch * kTileThreads) {
    int32_t exponents[kJoinBatch];
#pragma unroll
    for (int i = 0; i < kJoinBatch; ++i) {
      const int64_t tile = begin + i * kTileThreads;
      exponents[i] =
          tile < tiles.num_tiles ? tiles.sums[tile * tiles.tile_stride].exponent : kEmptyExponent;
    }
#pragma unroll
    for (int i = 0; i < kJoinBatch; ++i) exponent = Larger()(exponent, exponents[i]);
  }
  return RowMaximum<kRows>(exponent, scratch);
}

/// Returns the sums of this thread's row relative to `exponent`, with the squares only if
/// `wants_sum_squares` is set. All threads of the block must call it.
template <int kRows>
__device__ RowSums SumTiles(const TilesOfRow& tiles, int32_t exponent, bool wants_sum_squares,
                            int64_t* scratch) {
  constexpr int kTileThreads = kJoinThreads / kRows;
  const auto first = static_cast<int64_t>(threadIdx.x / kRows);
  const TileSums empty = {kEmptyExponent, 0.0F, 0.0F, 0.0F};
  RowSums row;
  row.exponent = exponent;
  for (int64_t begin = first; begin < tiles.num_tiles; begin += kJoinBatch * kTileThreads) {
    TileSums batch[kJoinBatch];
#pragma unroll
    for (int i = 0; i < kJoinBatch; ++i) {
      const int64_t tile = begin + i * kTileThreads;
      batch[i] =
          tile < tiles.num_tiles ? LoadTileSums(tiles.sums + tile * tiles.tile_stride) : empty;
    }
#pragma unroll
    for (int i = 0; i < kJoinBatch; ++i) AddTile(row, batch[i]);
  }
  AddSums<kRows>(row, wants_sum_squares, scratch);
  return row;
}

/// Returns the sums of this thread's row relative to the largest exponent of its tiles, of which a
/// thread has at most kHeldTiles. Does the same as LargestExponent and SumTiles, but reads each
/// tile once. All threads of the block must call it.
template <int kRows, int kHeldTiles>
__device__ RowSums SumHeldTiles(const TilesOfRow& tiles, bool wants_sum_squares, int64_t* scratch) {
  constexpr int kTileThreads = kJoinThreads / kRows;
  const auto first = static_cast<int64_t>(threadIdx.x / kRows);
  const TileSums empty = {kEmptyExponent, 0.0F, 0.0F, 0.0F};
  TileSums held[kHeldTiles];
#pragma unroll
  for (int i = 0; i < kHeldTiles; ++i) {
    const int64_t tile = first + i * kTileThreads;
    held[i] = tile < tiles.num_tiles ? LoadTileSums(tiles.sums + tile * tiles.tile_stride) : empty;
  }
  RowSums row;
#pragma unroll
  for (int i = 0; i < kHeldTiles; ++i) row.exponent = Larger()(row.exponent, held[i].exponent);
  row.exponent = RowMaximum<kRows>(row.exponent, scratch);
#pragma unroll
  for (int i = 0; i < kHeldTiles; ++i) AddTile(row, held[i]);
  AddSums<kRows>(row, wants_sum_squares, scratch);
  return row;
}

/// Sums of a row over the whole vocabulary.
struct JoinedSums {
  RowSums sums;
  RowSums entropy_sums;  // equal to `sums` unless the entropy has its own temperature
  bool has_entropy_sums;
};

/// Writes the outputs that depend on max_keys and min_keys.
__device__ inline void WriteExtremes(const RowScoresParams& params, int64_t row,
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

/// Writes all requested outputs of a row; one thread per row calls it.
__device__ inline void WriteScores(const RowScoresParams& params, int64_t row,
                                   const JoinedSums& joined) {
  const RowSums& sums = joined.sums;
  const RowNormalizer normalizer = NormalizerOf(sums);
  params.normalizers[row] = normalizer;
  params.nonfinite[row] = normalizer.finite ? 0 : 1;
  WriteExtremes(params, row, normalizer);
  if (params.logprob != nullptr) {
    params.logprob[row] = LogprobOf(params.target_logits[row], params.log2_scales[row], normalizer);
  }
  if (params.entropy != nullptr) {
    const RowNormalizer entropy_normalizer =
        joined.has_entropy_sums ? NormalizerOf(joined.entropy_sums) : normalizer;
    params.entropy[row] =
        normalizer.finite ? EntropyOf(joined.entropy_sums, entropy_normalizer, params.vocab_size)
                          : NAN;
  }
  if (params.lse != nullptr) params.lse[row] = LseOf(normalizer);
  if (params.lse_rest != nullptr) params.lse_rest[row] = LseRestOf(normalizer);
  if (params.sum_p_squared != nullptr) params.sum_p_squared[row] = SumPSquaredOf(sums, normalizer);
  if (params.target_rank != nullptr) {
    params.target_rank[row] = normalizer.finite ? params.rank_counts[row] : -1;
  }
}

/// Returns true if sizes, outputs and the inputs that they require are within the bounds that
/// row_scores.h states. It does not check the partials.
inline bool HasValidOutputs(const RowScoresParams& params) {
  const bool needs_max = params.argmax_id != nullptr || params.argmax_logprob != nullptr ||
                         params.max_logit != nullptr;
  return params.num_rows >= 0 && params.num_rows <= INT32_MAX && params.vocab_size >= 1 &&
         params.vocab_size <= (1 << 20) && params.log2_scales != nullptr &&
         params.normalizers != nullptr && params.nonfinite != nullptr &&
         (!needs_max || params.max_keys != nullptr) &&
         (params.min_logit == nullptr || params.min_keys != nullptr) &&
         (params.target_rank == nullptr || params.rank_counts != nullptr) &&
         (params.logprob == nullptr || params.target_logits != nullptr);
}

}  // namespace logprobd::kernels::internal
