#pragma once

// What becomes of a block tile's dot products: partials, straight from the registers.
//
// Idea      A quad of lanes holds a row's 192 sums of a tile, 48 a lane: maximum, exponent and sums
//           need two butterfly steps each and no shared memory.
// Traffic   16 bytes a row and tile; a warp writes eight rows at once.
// Numerics  kernels/common/tile_sums.cuh. Logits of -inf (masked columns too) make 0 * inf: sums
//           are then taken again with a floor, which leaves the bits of others alone.

#include <cstdint>

#include "kernels/common/logit_key.h"
#include "kernels/common/tile_sums.cuh"
#include "kernels/fused_sm90/fused_partials.h"
#include "kernels/fused_sm90/tile_epilogue.cuh"
#include "kernels/fused_sm90/tile_store.cuh"

namespace logprobd::kernels::internal {

/// As FusedPartialsParams, on the device; tiles of the whole vocabulary index the partials.
struct HeadEpilogueParams {
  int32_t num_rows;
  int32_t vocab_size;
  int32_t tile_begin;
  int32_t num_tiles;
  LogitTransform transform;
  const float* bias;
  const float* log2_scales;
  const float* entropy_log2_scales;
  const int32_t* targets;
  PartialLayout layout;
  TileSums* sums;
  TileSums* entropy_sums;
  float* target_logits;
  uint64_t* max_keys;
  uint32_t* min_keys;
  float* tile_max;
  int64_t tile_max_stride;
  bool wants_sum_squares;
  CachedExponentials exponentials;
};

template <bool kTransforms, bool kCachesExponentials>
class HeadEpilogue
    : public TileEpilogue<HeadEpilogue<kTransforms, kCachesExponentials>, HeadEpilogueParams> {
  using Base = TileEpilogue<HeadEpilogue<kTransforms, kCachesExponentials>, HeadEpilogueParams>;
  using Base::params_;

 public:
  using Base::Base;

  template <class Logits>
  __device__ __forceinline__ void TakeRow(const Logits& logits, int32_t row, int32_t tile_of_launch,
                                          int32_t lane_column) {
    const int32_t tile = params_.tile_begin + tile_of_launch;
    constexpr unsigned kFullWarp = 0xFFFFFFFFU;
    const bool has_row = row < params_.num_rows;
    const int32_t some_row = has_row ? row : params_.num_rows - 1;
    const int32_t tile_column = tile * kTileColumns;
    const int32_t first_column = tile_column + lane_column;
    // What is compared last is asked for first: it comes from the second-level cache.
    const uint32_t best = params_.max_keys == nullptr ? 0U : BestOf(some_row);
    int32_t level = kEmptyExponent;
    if constexpr (kCachesExponentials && !kTransforms) level = LevelOf(some_row);
    if constexpr (kTransforms) {
#pragma unroll
      for (int i = 0; i < Logits::kCount; ++i) {
        const float bias =
            params_.bias == nullptr ? 0.0F : params_.bias[first_column + Logits::Column(i)];
        logits.z(i) = LogitOf(logits.z(i), bias, params_.transform);
      }
    }
    if (tile_column + kTileColumns > params_.vocab_size) {
#pragma unroll
      for (int i = 0; i < Logits::kCount; ++i) {
        if (first_column + Logits::Column(i) >= params_.vocab_size) logits.z(i) = -INFINITY;
      }
    }
    float max_logit = MaxOrNan(logits.z(0), logits.z(1));
#pragma unroll
    for (int i = 2; i < Logits::kCount; ++i) max_logit = MaxOrNan(max_logit, logits.z(i));
    max_logit = MaxOrNan(max_logit, __shfl_xor_sync(kFullWarp, max_logit, 1));
    max_logit = MaxOrNan(max_logit, __shfl_xor_sync(kFullWarp, max_logit, 2));

    const int64_t partial = params_.layout.At(row, tile);
    const bool writes = has_row && lane_column == 0;
    const float* const scale_at = params_.log2_scales + some_row;
    const TileOrigin origin = TileOriginOf(max_logit, *scale_at);
    const auto no_visit = [](int, const float4&) {};
    ChainSums sums;
    if constexpr (kCachesExponentials && !kTransforms) {
      const PowerStore keep = ExponentialsTo(some_row, tile, lane_column, has_row, origin, level);
      sums = logits.template TileSumsOf<false>(origin, *scale_at, scale_at, keep);
    } else if (!kCachesExponentials && params_.wants_sum_squares) {
      sums = logits.template TileSumsOf<true>(origin, *scale_at, scale_at, no_visit);
    } else {
      sums = logits.template TileSumsOf<false>(origin, *scale_at, scale_at, no_visit);
    }
    if (writes) StoreTileSums(params_.sums + partial, origin, sums);
    if constexpr (kCachesExponentials && kTransforms) {
      // Powers are made anew: with what transforms take, no registers are left beside the sums.
      level = LevelOf(some_row);
      const PowerStore keep = ExponentialsTo(some_row, tile, lane_column, has_row, origin, level);
      const float log2_scale = *scale_at;
      const auto power = [&](int i) { return Exp2(__fmaf_rn(logits.z(i), log2_scale, -origin.k)); };
#pragma unroll
      for (int i = 0; i < Logits::kCount; i += 4) {
        keep(i, make_float4(power(i), power(i + 1), power(i + 2), power(i + 3)));
      }
    }
    if (writes && params_.tile_max != nullptr) {
      params_.tile_max[row * params_.tile_max_stride + tile] = max_logit;
    }
    if (params_.entropy_sums != nullptr) {
      const float* const entropy_at = params_.entropy_log2_scales + some_row;
      const TileOrigin entropy_origin = TileOriginOf(max_logit, *entropy_at);
      const ChainSums entropy_sums =
          logits.template TileSumsOf<false>(entropy_origin, *entropy_at, entropy_at, no_visit);
      if (writes) StoreTileSums(params_.entropy_sums + partial, entropy_origin, entropy_sums);
    }
    if (!has_row) return;
    StoreTarget(logits, row, tile_column, lane_column);
    if (params_.max_keys != nullptr) {
      RaiseMax(logits, row, max_logit, first_column, best);
    }
    if (params_.min_keys != nullptr) RaiseMin(logits, row, first_column);
  }

 private:
  __device__ __forceinline__ int32_t LevelOf(int32_t row) const {
    return params_.exponentials.reference_sums == nullptr
               ? kEmptyExponent
               : params_.exponentials.reference_sums[row].exponent;
  }

  /// Writes exponentials relative to a tile's k as exponentials relative to 2^e
  /// (CachedExponentials).
  struct PowerStore {
    TileRowStore<__nv_bfloat16> store;
    float factor;  // 2^(k - e)

    __device__ __forceinline__ void operator()(int i, const float4& exponentials) const {
      store.Write(
          i, make_float4(__fmul_rn(exponentials.x, factor), __fmul_rn(exponentials.y, factor),
                         __fmul_rn(exponentials.z, factor), __fmul_rn(exponentials.w, factor)));
    }
  };

  /// `level` is the row's, or an exponent that is not real.
  __device__ __forceinline__ PowerStore ExponentialsTo(int32_t row, int32_t tile,
                                                       int32_t lane_column, bool has_row,
                                                       const TileOrigin& origin,
                                                       int32_t level) const {
    const CachedExponentials& exponentials = params_.exponentials;
    int32_t exponent = origin.is_real ? origin.exponent : kEmptyExponent;
    float factor = 1.0F;
    const bool has_level = level != kEmptyExponent && level != kNonfiniteExponent;
    if (origin.is_real && has_level && exponent <= level + kReferenceReach) {
      constexpr int kBias = 127;
      // Exact; 0 where exponentials would be that small.
      factor = __int_as_float((max(exponent - level, -kBias) + kBias) << 23);
      exponent = level;
    }
    if (has_row && lane_column == 0) {
      exponentials.exponents[row * exponentials.exponent_stride + tile] = exponent;
    }
    const int64_t place = row * exponentials.row_tiles + tile;
    return {{exponentials.values + place * kTileColumns, lane_column, has_row}, factor};
  }

  template <class Logits>
  __device__ __forceinline__ void StoreTarget(const Logits& logits, int32_t row,
                                              int32_t tile_column, int32_t lane_column) {
    const int32_t target = params_.targets[row];
    const int32_t column = target - tile_column;
    if (target >= params_.vocab_size || column < 0 || column >= kTileColumns ||
        column % kTileChains / 2 * 2 != lane_column)
      return;
    float target_logit = 0.0F;
#pragma unroll
    for (int i = 0; i < Logits::kCount; ++i) {
      if (column - lane_column == Logits::Column(i)) target_logit = logits.z(i);
    }
    params_.target_logits[row] = target_logit;
  }

  /// The upper half of the row's key: its largest logit so far.
  __device__ __forceinline__ uint32_t BestOf(int32_t row) const {
    return reinterpret_cast<const volatile uint32_t*>(params_.max_keys + row)[1];
  }

  /// Most tiles are passed over: their maximum is below what another tile has given already.
  template <class Logits>
  __device__ __forceinline__ void RaiseMax(const Logits& logits, int32_t row, float max_logit,
                                           int32_t first_column, uint32_t best) {
    if (OrderedBits(max_logit) < best) return;
    int32_t column = -1;
#pragma unroll
    for (int i = Logits::kCount - 1; i >= 0; --i) {
      if (logits.z(i) == max_logit) column = Logits::Column(i);
    }
    if (column < 0) return;
    atomicMax(reinterpret_cast<unsigned long long*>(params_.max_keys + row),
              LogitKey(max_logit, first_column + column));
  }

  template <class Logits>
  __device__ __forceinline__ void RaiseMin(const Logits& logits, int32_t row,
                                           int32_t first_column) {
    float min_logit = INFINITY;
#pragma unroll
    for (int i = 0; i < Logits::kCount; ++i) {
      if (first_column + Logits::Column(i) < params_.vocab_size) {
        min_logit = fminf(min_logit, logits.z(i));
      }
    }
    const uint32_t key = ~OrderedBits(min_logit);
    if (key > *static_cast<const volatile uint32_t*>(params_.min_keys + row)) {
      atomicMax(params_.min_keys + row, key);
    }
  }
};

}  // namespace logprobd::kernels::internal
