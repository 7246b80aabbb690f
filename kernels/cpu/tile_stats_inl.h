#pragma once

// One pass over a tile of dot products while it is in the cache: it computes logits, their maximum
// and TileSums.
//
// Idea      A group has as many rows as a vector has lanes, so that the work per row (reductions
//           over lanes) is done for a whole group in vectors.
// Work      One call processes all rows of a unit.
// Traffic   Reads the dot products from the cache; transformed logits are written back.
// Numerics  2^x rounds x to an integer and evaluates a polynomial of degree 6 for the remainder (error
//           below one unit in the last place of a float). x is clamped to kShiftedMin: the clamped
//           terms, including those of -inf, are less than 2^-90 of the tile's sum, far below the
//           last place of the row's fixed-point sums. Lane i of a vector adds columns i, i + lanes,
//           ...; then the lanes are added as a tree, so the order is fixed. A NaN among
//           the logits makes the sum NaN, which is how it is detected.
// Limits    Each file for an instruction set includes this file; everything here has internal linkage.
// Source    Our own.

#include <cstdint>

#include "kernels/cpu/tile_kernels.h"

namespace logprobd::kernels {
namespace {

/// Returns 2^x for x in [-126, 126], and NaN for NaN.
template <class V>
inline typename V::Float Exp2(typename V::Float x) {
  using Float = typename V::Float;
  const Float n = V::Round(x);
  const Float f = V::Sub(x, n);  // exact, in [-1/2, 1/2]
  // Minimax polynomial in relative error (2e-9) with the constant term 1, so that 2^0 is exactly 1.
  Float p = V::Set(0x1.41fbbcp-13F);
  p = V::MulAdd(p, f, V::Set(0x1.5f3e54p-10F));
  p = V::MulAdd(p, f, V::Set(0x1.3b2d4cp-7F));
  p = V::MulAdd(p, f, V::Set(0x1.c6aee8p-5F));
  p = V::MulAdd(p, f, V::Set(0x1.ebfbdcp-3F));
  p = V::MulAdd(p, f, V::Set(0x1.62e430p-1F));
  p = V::MulAdd(p, f, V::Set(1.0F));
  return V::Scale(p, n);
}

/// Returns softcap * tanh(z / softcap). It uses an odd polynomial near 0 and an expression with 2^x
/// elsewhere. Roundings that the factor softcap would amplify are corrected: the error is about
/// 8e-8 of the result near 0 and 6e-8 of softcap elsewhere.
template <class V>
inline typename V::Float Cap(typename V::Float z, float softcap) {
  using Float = typename V::Float;
  const Float cap = V::Set(softcap);
  // Beyond 10 the result rounds to softcap. This order of Min's arguments propagates NaN.
  const Float magnitude = V::Min(V::Set(10.0F * softcap), V::Abs(z));
  const Float a = V::Div(magnitude, cap);
  const Float s = V::Mul(a, a);
  Float p = V::Set(-0.0057049864F);
  p = V::MulAdd(p, s, V::Set(0.020639086F));
  p = V::MulAdd(p, s, V::Set(-0.053739715F));
  p = V::MulAdd(p, s, V::Set(0.13331442F));
  p = V::MulAdd(p, s, V::Set(-0.3333328F));
  const Float small = V::MulAdd(V::Mul(z, s), p, z);
  // e = exp(2 a) = 2^y; `error` is the natural logarithm of what the roundings of a and y lost.
  constexpr double kTwoLog2E = 2.8853900817779268;
  constexpr auto kFactor = static_cast<float>(kTwoLog2E);
  constexpr auto kFactorRest = static_cast<float>(kTwoLog2E - static_cast<double>(kFactor));
  const Float y = V::Mul(a, V::Set(kFactor));
  const Float y_product = V::MulAddOnce(a, V::Set(kFactor), V::Sub(V::Set(0.0F), y));
  const Float y_rest = V::MulAdd(a, V::Set(kFactorRest), y_product);
  const Float a_rest = V::MulAddOnce(a, V::Set(-softcap), magnitude);
  const Float error =
      V::MulAdd(a_rest, V::Set(2.0F / softcap), V::Mul(y_rest, V::Set(0.69314718F)));
  const Float rounded = Exp2<V>(y);
  const Float e = V::MulAdd(rounded, error, rounded);
  const Float large = V::Sub(cap, V::Div(V::Set(2.0F * softcap), V::Add(e, V::Set(1.0F))));
  return V::SelectLess(a, V::Set(0.625F), small, V::CopySign(large, z));
}

template <class V>
inline void TransformRow(const CpuTileStatsParams& params, float* logits) {
  using Float = typename V::Float;
  const Float scale = V::Set(params.transform.scale);
  const float softcap = params.transform.softcap;
  for (int column = 0; column < kTileColumns; column += V::kLanes) {
    const Float bias = params.bias != nullptr ? V::Load(params.bias + column) : V::Set(0.0F);
    Float z = V::MulAdd(scale, V::Load(logits + column), bias);
    if (softcap > 0) z = Cap<V>(z, softcap);
    V::Store(logits + column, z);
  }
}

template <class V>
inline typename V::Float MaxOfRow(const float* logits) {
  typename V::Float max[2] = {V::Load(logits), V::Load(logits + V::kLanes)};
#pragma GCC unroll 12
  for (int i = 2; i < kTileColumns / V::kLanes; ++i) {
    max[i % 2] = V::Max(max[i % 2], V::Load(logits + i * V::kLanes));
  }
  return V::Max(max[0], max[1]);
}

/// Lower bound of y - k.
constexpr float kShiftedMin = -100.0F;

/// Sums per lane of one row at one scale.
template <class V>
struct LaneSums {
  typename V::Float sum;
  typename V::Float weighted;
  typename V::Float squares;
};

template <class V, bool kSquares>
inline LaneSums<V> SumsOfRow(const float* logits, float log2_scale, float exponent) {
  using Float = typename V::Float;
  const Float c = V::Set(log2_scale);
  const Float minus_k = V::Set(-exponent);
  const Float zero = V::Set(0.0F);
  LaneSums<V> part[2] = {{zero, zero, zero}, {zero, zero, zero}};
#pragma GCC unroll 12
  for (int i = 0; i < kTileColumns / V::kLanes; ++i) {
    LaneSums<V>& to = part[i % 2];
    const Float shifted = V::MulAddOnce(V::Load(logits + i * V::kLanes), c, minus_k);
    const Float x = V::Max(V::Set(kShiftedMin), shifted);  // this order propagates NaN
    const Float e = Exp2<V>(x);
    to.sum = V::Add(to.sum, e);
    to.weighted = V::MulAdd(x, e, to.weighted);
    if (kSquares) to.squares = V::MulAdd(e, e, to.squares);
  }
  return {V::Add(part[0].sum, part[1].sum), V::Add(part[0].weighted, part[1].weighted),
          V::Add(part[0].squares, part[1].squares)};
}

/// Returns true if the row contains a NaN. The maximum skips NaN, so this check is needed if the
/// maximum is -inf.
inline bool HasNan(const float* logits) {
  bool has_nan = false;
  for (int column = 0; column < kTileColumns; ++column) has_nan |= logits[column] != logits[column];
  return has_nan;
}

/// Returns the lowest column of the tile whose logit is `max_logit`.
template <class V>
inline int32_t ArgmaxOfRow(const float* logits, float max_logit) {
  for (int column = 0; column < kTileColumns; column += V::kLanes) {
    const uint32_t mask = V::EqualMask(V::Load(logits + column), V::Set(max_logit));
    if (mask != 0) return column + __builtin_ctz(mask);
  }
  return 0;
}

inline float MinOfRow(const float* logits, int32_t num_columns) {
  float min = logits[0];
  for (int32_t column = 1; column < num_columns; ++column) {
    min = logits[column] < min ? logits[column] : min;
  }
  return min;
}

/// Returns the number of columns that rank above the target (RanksAbove). `target_column` is
/// relative to the first column and may lie in another tile.
inline int32_t CountAbove(const float* logits, int32_t num_columns, float target_logit,
                          int32_t target_column) {
  const int32_t lower_ids = target_column < 0             ? 0
                            : target_column > num_columns ? num_columns
                                                          : target_column;
  int32_t count = 0;
  for (int32_t column = 0; column < lower_ids; ++column) count += logits[column] >= target_logit;
  for (int32_t column = lower_ids; column < num_columns; ++column) {
    count += logits[column] > target_logit;
  }
  return count;
}

/// Computes TileSums of `num_rows` (at most V::kLanes) rows, which start at `logits`, at
/// scales[row].
template <class V, bool kSquares>
inline void SumsOfGroup(const float* logits, int64_t num_rows, const float* max_logits,
                        const float* scales, TileSums* sums) {
  using Float = typename V::Float;
  int32_t exponents[V::kLanes];
  Float sum[V::kLanes];
  Float weighted[V::kLanes];
  Float squares[V::kLanes];
  for (int row = 0; row < V::kLanes; ++row) sum[row] = weighted[row] = squares[row] = V::Set(0.0F);
  for (int64_t row = 0; row < num_rows; ++row) {
    exponents[row] = TileExponent(max_logits[row], scales[row]);
    const bool is_real = exponents[row] != kEmptyExponent && exponents[row] != kNonfiniteExponent;
    const LaneSums<V> lanes =
        SumsOfRow<V, kSquares>(logits + row * kTileColumns, scales[row],
                               is_real ? static_cast<float>(exponents[row]) : 0.0F);
    sum[row] = lanes.sum;
    weighted[row] = lanes.weighted;
    if (kSquares) squares[row] = lanes.squares;
  }
  float row_sum[V::kLanes];
  float row_weighted[V::kLanes];
  float row_squares[V::kLanes] = {};
  V::Store(row_sum, V::ReduceAddRows(sum));
  V::Store(row_weighted, V::ReduceAddRows(weighted));
  if (kSquares) V::Store(row_squares, V::ReduceAddRows(squares));
  for (int64_t row = 0; row < num_rows; ++row) {
    TileSums& to = sums[row];
    to = {exponents[row], row_sum[row], row_weighted[row], row_squares[row]};
    if (exponents[row] == kEmptyExponent) {
      const bool has_nan = HasNan(logits + row * kTileColumns);
      to = {has_nan ? kNonfiniteExponent : kEmptyExponent, 0, 0, 0};
    } else if (exponents[row] == kNonfiniteExponent || row_sum[row] != row_sum[row]) {
      to = {kNonfiniteExponent, 0, 0, 0};
    }
  }
}

template <class V, bool kSquares>
inline void StatsOfGroup(const CpuTileStatsParams& params, int64_t row_begin, int64_t num_rows) {
  using Float = typename V::Float;
  const bool transforms =
      params.transform.scale != 1.0F || params.transform.softcap > 0 || params.bias != nullptr;
  float* logits = params.logits + row_begin * kTileColumns;
  Float max[V::kLanes];
  for (int row = 0; row < V::kLanes; ++row) max[row] = V::Set(0.0F);
  for (int64_t row = 0; row < num_rows; ++row) {
    float* row_logits = logits + row * kTileColumns;
    if (transforms) TransformRow<V>(params, row_logits);
    for (int32_t column = params.num_columns; column < kTileColumns; ++column) {
      row_logits[column] = -__builtin_inff();
    }
    max[row] = MaxOfRow<V>(row_logits);
  }
  float max_logits[V::kLanes];
  V::Store(max_logits, V::ReduceMaxRows(max));

  SumsOfGroup<V, kSquares>(logits, num_rows, max_logits, params.log2_scales + row_begin,
                           params.sums + row_begin);
  if (params.entropy_log2_scales != nullptr) {
    SumsOfGroup<V, false>(logits, num_rows, max_logits, params.entropy_log2_scales + row_begin,
                          params.entropy_sums + row_begin);
  }
  if (params.target_logits != nullptr) {
    for (int64_t row = 0; row < num_rows; ++row) {
      params.rank_counts[row_begin + row] = CountAbove(
          logits + row * kTileColumns, params.num_columns, params.target_logits[row_begin + row],
          params.targets[row_begin + row] - params.first_column);
    }
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    TileExtremes& extremes = params.extremes[row_begin + row];
    extremes.max_logit = max_logits[row];
    if (params.wants_extremes) {
      const float* row_logits = logits + row * kTileColumns;
      extremes.argmax = params.first_column + ArgmaxOfRow<V>(row_logits, max_logits[row]);
      extremes.min_logit = MinOfRow(row_logits, params.num_columns);
    }
  }
}

template <class V>
inline void TileStats(const CpuTileStatsParams& params) {
  for (int64_t row = 0; row < params.num_rows; row += V::kLanes) {
    const int64_t rest = params.num_rows - row;
    const int64_t num_rows = rest < V::kLanes ? rest : V::kLanes;
    if (params.wants_sum_squares) {
      StatsOfGroup<V, true>(params, row, num_rows);
    } else {
      StatsOfGroup<V, false>(params, row, num_rows);
    }
  }
}

}  // namespace
}  // namespace logprobd::kernels
