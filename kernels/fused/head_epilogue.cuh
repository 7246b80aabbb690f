#pragma once

// HeadEpilogue: turns the dot products of a block tile into partials while they are in registers.
//
// Idea      A quad of lanes holds the 192 accumulators of a row of a tile, 48 per lane. The
//           maximum, and then the sums, need two butterfly steps each and no shared memory.
// Work      A warp holds 16 rows, or 16 rows of every 64 of its warpgroup; a lane processes two of
//           them, eight apart.
// Traffic   Writes 16 bytes per row and tile, and 384 bytes more when exponentials are cached. A
//           warp writes eight rows at once.
// Numerics  See kernels/common/tile_sums.cuh. A logit of -inf (or a masked column) multiplies 0
//           by infinity; the sums are then computed again with a floor, which does not change
//           finite terms.
// Limits    See LaunchFusedPartials.
// Source    Our own.

#include <cstdint>

#include "kernels/common/host_device.h"
#include "kernels/common/logit_key.h"
#include "kernels/common/tile_sums.cuh"
#include "kernels/fused/lane_logits.cuh"
#include "kernels/fused/params.h"
#include "kernels/fused/transform_logits.cuh"

namespace logprobd::kernels::internal {

/// FusedPartialsParams as the device reads them. Pointers to partials are offset for indices that
/// count tiles of the whole vocabulary.
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
  int32_t* rank_counts;
  float* tile_max;
  int64_t tile_max_stride;
  bool wants_sum_squares;
  CachedExponentials exponentials;
};

/// How a row of a tile is cached (CachedExponentials): its exponent e, and the factor 2^(k - e) of
/// exponentials relative to the tile's k.
struct ExponentialScale {
  int32_t exponent;
  float factor;
};

/// Returns the reference exponent of a row, or kEmptyExponent if it has none.
__device__ __forceinline__ int32_t ReferenceOf(const CachedExponentials& exponentials,
                                               int32_t row) {
  return exponentials.reference_sums == nullptr ? kEmptyExponent
                                                : exponentials.reference_sums[row].exponent;
}

/// Returns how a row of a tile is cached, given its origin and the row's reference exponent.
__device__ __forceinline__ ExponentialScale ExponentialScaleOf(const TileOrigin& origin,
                                                               int32_t reference) {
  ExponentialScale scale = {origin.is_real ? origin.exponent : kEmptyExponent, 1.0F};
  const bool has_reference = reference != kEmptyExponent && reference != kNonfiniteExponent;
  if (origin.is_real && has_reference && scale.exponent <= reference + kReferenceReach) {
    constexpr int kBias = 127;
    // The factor is exactly 2^(k - e), or 0 below the normal range.
    scale.factor = __int_as_float((max(scale.exponent - reference, -kBias) + kBias) << 23);
    scale.exponent = reference;
  }
  return scale;
}

/// Returns `exponentials` with pointers that are offset for indices that count tiles of the whole
/// vocabulary.
inline CachedExponentials CacheIndexedByVocabularyTile(CachedExponentials exponentials,
                                                       int64_t tile_begin) {
  exponentials.values =
      IndexedByVocabularyTile(exponentials.values, tile_begin, int64_t{kTileColumns});
  exponentials.exponents = IndexedByVocabularyTile(exponentials.exponents, tile_begin, int64_t{1});
  if (exponentials.exponent_stride == 0) exponentials.exponent_stride = exponentials.row_tiles;
  return exponentials;
}

/// Returns checked parameters as the device reads them.
inline HeadEpilogueParams HeadEpilogueParamsOf(const FusedPartialsParams& params) {
  const auto num_tiles = static_cast<int32_t>(params.tile_end - params.tile_begin);
  const int64_t tile_stride = params.layout.tile_stride;
  return {
      .num_rows = static_cast<int32_t>(params.num_rows),
      .vocab_size = static_cast<int32_t>(params.vocab_size),
      .tile_begin = static_cast<int32_t>(params.tile_begin),
      .num_tiles = num_tiles,
      .transform = params.transform,
      .bias = params.bias,
      .log2_scales = params.log2_scales,
      .entropy_log2_scales = params.entropy_log2_scales,
      .targets = params.targets,
      .layout = params.layout,
      .sums = IndexedByVocabularyTile(params.sums, params.tile_begin, tile_stride),
      .entropy_sums = IndexedByVocabularyTile(params.entropy_sums, params.tile_begin, tile_stride),
      .target_logits = params.target_logits,
      .max_keys = params.max_keys,
      .min_keys = params.min_keys,
      .rank_counts = params.rank_counts,
      .tile_max = IndexedByVocabularyTile(params.tile_max, params.tile_begin, 1),
      .tile_max_stride = num_tiles,
      .wants_sum_squares = params.wants_sum_squares,
      .exponentials = CacheIndexedByVocabularyTile(params.exponentials, params.tile_begin)};
}

template <bool kTransforms, bool kCachesExponentials>
class HeadEpilogue {
 public:
  static constexpr bool kHasTransforms = kTransforms;
  using Params = HeadEpilogueParams;

  LOGPROBD_HOST_DEVICE explicit HeadEpilogue(const Params& params) : params_(params) {}

  /// Processes a lane's logits of one row; `tile_of_launch` counts from the launch's first tile.
  template <class Logits>
  __device__ __forceinline__ void TakeRow(const Logits& logits, int32_t row, int32_t tile_of_launch,
                                          int32_t lane_column) {
    const int32_t tile = params_.tile_begin + tile_of_launch;
    constexpr unsigned kFullWarp = 0xFFFFFFFFU;
    const bool has_row = row < params_.num_rows;
    const int32_t some_row = has_row ? row : params_.num_rows - 1;
    const int32_t tile_column = tile * kTileColumns;
    const int32_t first_column = tile_column + lane_column;
    if constexpr (kTransforms) {
      TransformLogits(logits, params_.bias, first_column, params_.transform);
    }
    // These loads start early because they have the latency of the second-level cache.
    const uint32_t best = params_.max_keys == nullptr ? 0U : BestOf(some_row);
    const float* const scale_at = params_.log2_scales + some_row;
    const float log2_scale = *scale_at;
    int32_t target = 0;
    if constexpr (!kCachesExponentials) target = params_.targets[some_row];
    int32_t reference = kEmptyExponent;
    if constexpr (kCachesExponentials && !kTransforms) {
      reference = ReferenceOf(params_.exponentials, some_row);
    }
    if (tile_column + kTileColumns > params_.vocab_size) {
#pragma unroll
      for (int i = 0; i < Logits::kCount; ++i) {
        if (first_column + Logits::Column(i) >= params_.vocab_size) logits.z(i) = -INFINITY;
      }
    }
    float max_logit = logits.Max();
    max_logit = MaxOrNan(max_logit, __shfl_xor_sync(kFullWarp, max_logit, 1));
    max_logit = MaxOrNan(max_logit, __shfl_xor_sync(kFullWarp, max_logit, 2));

    const int64_t partial = params_.layout.At(row, tile);
    const bool writes = has_row && lane_column == 0;
    const TileOrigin origin = TileOriginOf(max_logit, log2_scale);
    const auto no_visit = [](int, const float4&) {};
    ChainSums sums;
    if constexpr (kCachesExponentials && !kTransforms) {
      const ExponentialStore store =
          ExponentialsTo(some_row, tile, lane_column, has_row, origin, reference);
      sums = logits.template TileSumsOf<false>(origin, log2_scale, scale_at, store);
    } else if (!kCachesExponentials && params_.wants_sum_squares) {
      sums = logits.template TileSumsOf<true>(origin, log2_scale, scale_at, no_visit);
    } else {
      sums = logits.template TileSumsOf<false>(origin, log2_scale, scale_at, no_visit);
    }
    if (writes) StoreTileSums(params_.sums + partial, origin, sums);
    if constexpr (kCachesExponentials && kTransforms) {
      // The exponentials are computed again, because transforms do not leave enough registers to
      // write them while the sums are computed.
      reference = ReferenceOf(params_.exponentials, some_row);
      const ExponentialStore store =
          ExponentialsTo(some_row, tile, lane_column, has_row, origin, reference);
      const float same_scale = *scale_at;  // otherwise those of the sums would stay in registers
      const auto exponential = [&](int i) {
        return Exp2(__fmaf_rn(logits.z(i), same_scale, -origin.k));
      };
#pragma unroll
      for (int i = 0; i < Logits::kCount; i += 4) {
        store(i, make_float4(exponential(i), exponential(i + 1), exponential(i + 2),
                             exponential(i + 3)));
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
    if (params_.rank_counts != nullptr) {
      AddRank(logits, some_row, writes, first_column, max_logit);  // on all lanes
    }
    if (!has_row) return;
    // Where exponentials are cached, no register was left for it before.
    if constexpr (kCachesExponentials) target = params_.targets[row];
    StoreTarget(logits, row, target, tile_column, lane_column);
    if (params_.max_keys != nullptr) RaiseMax(logits, row, max_logit, first_column, best);
    if (params_.min_keys != nullptr) RaiseMin(logits, row, first_column);
  }

 private:
  /// Converts exponentials relative to a tile's k to exponentials relative to e
  /// (CachedExponentials) and writes them.
  struct ExponentialStore {
    TileRowStore<__nv_bfloat16> store;
    float factor;  // 2^(k - e)

    __device__ __forceinline__ void operator()(int i, const float4& exponentials) const {
      store.Write(
          i, make_float4(__fmul_rn(exponentials.x, factor), __fmul_rn(exponentials.y, factor),
                         __fmul_rn(exponentials.z, factor), __fmul_rn(exponentials.w, factor)));
    }
  };

  /// Writes the exponent e of a row of a tile and returns the store of its exponentials.
  /// `reference` is the row's reference exponent, kEmptyExponent or kNonfiniteExponent.
  __device__ __forceinline__ ExponentialStore ExponentialsTo(int32_t row, int32_t tile,
                                                             int32_t lane_column, bool has_row,
                                                             const TileOrigin& origin,
                                                             int32_t reference) const {
    const CachedExponentials& exponentials = params_.exponentials;
    const ExponentialScale scale = ExponentialScaleOf(origin, reference);
    if (has_row && lane_column == 0) {
      exponentials.exponents[row * exponentials.exponent_stride + tile] = scale.exponent;
    }
    const int64_t cached_tile = row * exponentials.row_tiles + tile;
    return {{exponentials.values + cached_tile * kTileColumns, lane_column, has_row}, scale.factor};
  }

  /// Writes the target's logit if this lane owns its column.
  template <class Logits>
  __device__ __forceinline__ void StoreTarget(const Logits& logits, int32_t row, int32_t target,
                                              int32_t tile_column, int32_t lane_column) {
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

  /// Adds the number of the tile's logits that rank above the target's. All lanes of a warp call
  /// it. Logits beyond the vocabulary are -inf and have higher ids than the target, so none counts.
  template <class Logits>
  __device__ __forceinline__ void AddRank(const Logits& logits, int32_t row, bool writes,
                                          int32_t first_column, float max_logit) {
    constexpr unsigned kFullWarp = 0xFFFFFFFFU;
    const float target_logit = params_.target_logits[row];
    // Few tiles have a logit above those of likely targets.
    if (__all_sync(kFullWarp, max_logit < target_logit)) return;
    const int32_t target = params_.targets[row] - first_column;
    const float counted = target >= kTileColumns ? target_logit : NextAbove(target_logit);
    // One count would be a chain of additions that wait for each other, and so do the instructions
    // that the compiler makes of counts in integers.
    float counts[4] = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
    for (int i = 0; i < Logits::kCount; ++i) counts[i % 4] += logits.z(i) >= counted ? 1.0F : 0.0F;
    if (target >= 0 && target < kTileColumns) {
#pragma unroll
      for (int i = 0; i < Logits::kCount; ++i) {
        const bool is_equal_before = logits.z(i) == target_logit && Logits::Column(i) < target;
        counts[i % 4] += is_equal_before ? 1.0F : 0.0F;
      }
    }
    auto count = static_cast<int32_t>((counts[0] + counts[1]) + (counts[2] + counts[3]));
    count += __shfl_xor_sync(kFullWarp, count, 1);
    count += __shfl_xor_sync(kFullWarp, count, 2);
    if (writes && count > 0) atomicAdd(params_.rank_counts + row, count);
  }

  /// Returns the upper half of the row's max_keys entry: OrderedBits of its largest logit so far.
  __device__ __forceinline__ uint32_t BestOf(int32_t row) const {
    return reinterpret_cast<const volatile uint32_t*>(params_.max_keys + row)[1];
  }

  /// Raises the row's max_keys entry. Most tiles return early because another tile already has a
  /// larger logit.
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

  /// Raises the row's min_keys entry.
  template <class Logits>
  __device__ __forceinline__ void RaiseMin(const Logits& logits, int32_t row,
                                           int32_t first_column) {
    float min_logits[4] = {INFINITY, INFINITY, INFINITY, INFINITY};  // side by side
#pragma unroll
    for (int i = 0; i < Logits::kCount; ++i) {
      if (first_column + Logits::Column(i) < params_.vocab_size) {
        min_logits[i % 4] = fminf(min_logits[i % 4], logits.z(i));
      }
    }
    const float min_logit =
        fminf(fminf(min_logits[0], min_logits[1]), fminf(min_logits[2], min_logits[3]));
    const uint32_t key = ~OrderedBits(min_logit);
    if (key > *static_cast<const volatile uint32_t*>(params_.min_keys + row)) {
      atomicMax(params_.min_keys + row, key);
    }
  }

 protected:
  const Params& params_;
};

}  // namespace logprobd::kernels::internal
