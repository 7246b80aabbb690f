#pragma once

// WriteTileCandidates: lists the logits of a row's tile that can be among the row's k largest.
//
// Idea      A row's k tiles with the largest maxima are ranked by maximum, at a tie by position. The
//           maxima of the r tiles that precede a tile rank above all of its logits, so at most its
//           k - r largest logits can be among the k largest. None of them is below the smallest of
//           the k maxima, the row's floor. Few logits reach the floor unless logits are equal or a
//           tile holds most of the list, so the others are excluded by bisection, first of the
//           logit and then of the column.
// Work      A quad of lanes lists the tile of a row, with the columns that LaneLogits describes.
// Traffic   Writes 8 bytes per entry; the list of a row has k (k + 1) / 2 entries.
// Numerics  Exact. Among equal logits the lower column precedes. NaN is listed as +inf.
// Limits    All lanes of a warp must call it.
// Source    Our own.

#include <cstdint>

#include "kernels/common/device_math.cuh"
#include "kernels/common/logit_key.h"
#include "kernels/common/tile.h"
#include "kernels/fused/tile_logits.h"
#include "kernels/fused/transform_logits.cuh"

namespace logprobd::kernels::internal {

/// Inputs and outputs of WriteTileCandidates. Arrays start with the shard's first column and with
/// the row of pair 0.
struct CandidateParams {
  LogitTransform transform;
  const float* bias;  // [columns, rounded up to whole tiles], or null
  int32_t columns;    // from the shard's first column to the end of the vocabulary
  int32_t first_id;   // of the shard's first column
  int32_t top_k;
  const uint64_t* tile_keys;  // [rows, top_k]
  uint64_t* candidates;       // [rows, CandidatesPerRow(top_k)]
};

/// Returns the parameters for the pairs of `params`.
inline CandidateParams CandidateParamsOf(const TileLogitsParams& params) {
  const FusedPartialsParams& partials = *params.partials;
  const int64_t first_id = partials.tile_begin * kTileColumns;
  return {.transform = partials.transform,
          .bias = partials.bias == nullptr ? nullptr : partials.bias + first_id,
          .columns = static_cast<int32_t>(partials.vocab_size - first_id),
          .first_id = static_cast<int32_t>(first_id),
          .top_k = params.top_k,
          .tile_keys = params.tile_keys,
          .candidates = params.candidates};
}

/// The lowest logit that is listed; of the logits equal to it, only those in columns of the tile
/// before `column_end` are.
struct CandidateBound {
  float logit;
  int32_t column_end;

  __device__ __forceinline__ bool Includes(float logit_of_column, int32_t column) const {
    if (logit_of_column < logit) return false;  // true for most logits
    return logit_of_column > logit || column < column_end;
  }
};

/// Returns the sum of `value` over a quad of lanes.
__device__ __forceinline__ int32_t QuadSum(int32_t value) {
  value += __shfl_xor_sync(0xFFFFFFFFU, value, 1);
  return value + __shfl_xor_sync(0xFFFFFFFFU, value, 2);
}

/// Returns how many of the lane's logits satisfy `condition(logit, column)`.
template <class Logits, class Condition>
__device__ __forceinline__ int32_t CountOfLane(const Logits& logits, int32_t lane_column,
                                               const Condition& condition) {
  int32_t count = 0;
#pragma unroll
  for (int i = 0; i < Logits::kCount; ++i) {
    if (condition(logits.z(i), lane_column + Logits::Column(i))) ++count;
  }
  return count;
}

/// Returns the bound of a quad's `limit` largest logits if more than these reach the floor
/// (`has_excess`), otherwise the floor.
template <class Logits>
__device__ __forceinline__ CandidateBound BoundOfLargest(const Logits& logits, int32_t lane_column,
                                                         float floor, int32_t limit,
                                                         bool has_excess) {
  // The largest logit that at least `limit` logits reach is in [low, high).
  uint32_t low = OrderedBits(floor);
  uint32_t high = has_excess ? OrderedBits(INFINITY) + 1 : low + 1;
#pragma unroll 1
  while (__any_sync(0xFFFFFFFFU, high - low > 1)) {
    const uint32_t middle = low + (high - low) / 2;
    const float logit = FromOrderedBits(middle);
    const int32_t reach =
        QuadSum(CountOfLane(logits, lane_column, [&](float z, int32_t) { return z >= logit; }));
    (reach >= limit ? low : high) = middle;
  }
  const float logit = FromOrderedBits(low);
  const int32_t above =
      QuadSum(CountOfLane(logits, lane_column, [&](float z, int32_t) { return z > logit; }));
  // The first limit - above of the logits equal to it end at a column in (begin, end].
  int32_t begin = 0;
  int32_t end = kTileColumns;
#pragma unroll 1
  for (int width = kTileColumns; width > 1; width = (width + 1) / 2) {
    const int32_t middle = (begin + end) / 2;
    const int32_t equal = QuadSum(CountOfLane(logits, lane_column, [&](float z, int32_t column) {
      return z == logit && column < middle;
    }));
    (above + equal >= limit ? end : begin) = middle;
  }
  return {logit, has_excess ? end : kTileColumns};
}

/// Turns the dot products of a lane's share of a row of `tile` into logits and writes the entries
/// of the pair's candidates: LogitKeys, and 0 in the entries that remain. `pair` is negative if the
/// row does not exist; then nothing is written.
template <class Logits>
__device__ __forceinline__ void WriteTileCandidates(const CandidateParams& params,
                                                    const Logits& logits, int32_t pair,
                                                    int32_t tile, int32_t lane_column) {
  const int32_t first_column = tile * kTileColumns;
  TransformLogits(logits, params.bias, first_column + lane_column, params.transform);
#pragma unroll
  for (int i = 0; i < Logits::kCount; ++i) {
    // NaN would compare as neither smaller nor larger.
    logits.z(i) = fminf(logits.z(i), INFINITY);
  }
  const int32_t columns = params.columns - first_column;
  if (columns < kTileColumns) {  // columns beyond the vocabulary rank below all others
#pragma unroll
    for (int i = 0; i < Logits::kCount; ++i) {
      if (lane_column + Logits::Column(i) >= columns) logits.z(i) = -INFINITY;
    }
  }

  float floor = -INFINITY;
  int32_t limit = kTileColumns;
  if (pair >= 0) {
    limit = params.top_k - pair % params.top_k;
    // A row with fewer than top_k tiles ends with empty slots.
    const uint64_t last = params.tile_keys[pair + limit - 1];
    if (last != 0) floor = fminf(LogitEntryOf(last).logit, INFINITY);
  }
  CandidateBound bound = {floor, kTileColumns};
  int32_t count = CountOfLane(logits, lane_column, [&](float z, int32_t) { return z >= floor; });
  int32_t total = QuadSum(count);
  if (__any_sync(0xFFFFFFFFU, total > limit)) {
    bound = BoundOfLargest(logits, lane_column, floor, limit, total > limit);
    count = CountOfLane(logits, lane_column,
                        [&](float z, int32_t column) { return bound.Includes(z, column); });
    total = QuadSum(count);
  }
  const int lane = lane_column / 2;  // of the quad
  int32_t next = count;
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    const int32_t before = __shfl_up_sync(0xFFFFFFFFU, next, offset, 4);
    if (lane >= offset) next += before;
  }
  next -= count;  // the sum over the quad's lanes before this one
  if (pair < 0) return;
  uint64_t* const out = params.candidates + pair / params.top_k * CandidatesPerRow(params.top_k) +
                        CandidatesBefore(params.top_k - limit, params.top_k);
#pragma unroll
  for (int i = 0; i < Logits::kCount; ++i) {
    const int32_t column = lane_column + Logits::Column(i);
    if (!bound.Includes(logits.z(i), column)) continue;
    out[next++] =
        column < columns ? LogitKey(logits.z(i), params.first_id + first_column + column) : 0;
  }
  for (int32_t i = total + lane; i < limit; i += 4) out[i] = 0;
}

}  // namespace logprobd::kernels::internal
