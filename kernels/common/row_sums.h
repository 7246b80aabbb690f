#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/common/host_device.h"
#include "kernels/common/tile.h"

namespace logprobd::kernels {

/// Sums of a row over a set of its tiles, in 64-bit fixed point relative to one exponent.
///
/// Integer addition is associative: any grouping of tiles over threads, chunks or shards gives the
/// same bits, provided that all use the same `exponent`, which is the largest exponent of all tiles
/// of the row. It must be found (the maximum over tiles, then over shards) before tiles are added.
/// With at most 2^20 columns sums stay below 2^62.
struct RowSums {
  int32_t exponent = kEmptyExponent;
  int64_t sum = 0;
  int64_t weighted = 0;
  int64_t sum_squares = 0;
};

/// Fixed-point representation of 1: the quantum is 2^-42. A row's sum is at least 1/2, so its
/// relative error is at most 5e-13.
inline constexpr double kFixedPointOne = 4398046511104.0;

/// Returns `value` in fixed point, rounded to the nearest multiple of the quantum.
LOGPROBD_HOST_DEVICE inline int64_t ToFixedPoint(double value) {
#ifdef __CUDA_ARCH__
  return __double2ll_rn(value * kFixedPointOne);
#else
  return static_cast<int64_t>(rint(value * kFixedPointOne));
#endif
}

/// Returns 2^shift for -1022 <= shift <= 0.
LOGPROBD_HOST_DEVICE inline double PowerOfTwo(int32_t shift) {
#ifdef __CUDA_ARCH__
  return __hiloint2double((1023 + shift) << 20, 0);
#else
  return ldexp(1.0, shift);
#endif
}

/// Adds `tile` to `row`, whose exponent is final and at least the tile's. A tile whose exponent is
/// at least 100 below the row's has sums of less than half a quantum and adds nothing.
LOGPROBD_HOST_DEVICE inline void AddTile(RowSums& row, const TileSums& tile) {
  if (tile.exponent == kEmptyExponent || row.exponent == kNonfiniteExponent) return;
  const int64_t distance = static_cast<int64_t>(tile.exponent) - row.exponent;
  if (distance <= -100) return;
  const auto shift = static_cast<int32_t>(distance);
  // Rebase the tile to the row's exponent: S' = S 2^shift, W' = (W + shift S) 2^shift, Q' = Q 2^(2
  // shift).
  const double factor = PowerOfTwo(shift);
  const double sum = tile.sum;
  row.sum += ToFixedPoint(sum * factor);
  row.weighted += ToFixedPoint(
      (static_cast<double>(tile.weighted) + static_cast<double>(shift) * sum) * factor);
  if (tile.sum_squares != 0.0F) {
    row.sum_squares += ToFixedPoint(static_cast<double>(tile.sum_squares) * factor * factor);
  }
}

/// Normalizer of a row: exponent + log2_sum is log2 of the sum of 2^y.
struct RowNormalizer {
  int32_t exponent;
  double log2_sum;
  bool finite;  ///< False if a logit is NaN or +inf, or all are -inf; then every score is NaN.
};

/// Returns the normalizer of a row, given its sums over all tiles.
LOGPROBD_HOST_DEVICE inline RowNormalizer NormalizerOf(const RowSums& row) {
  const bool finite =
      row.exponent != kNonfiniteExponent && row.exponent != kEmptyExponent && row.sum > 0;
  return {row.exponent, finite ? log2(static_cast<double>(row.sum) / kFixedPointOne) : 0.0, finite};
}

inline constexpr double kLn2 = 0.69314718055994530942;

/// Returns the log-probability of a logit, in nats, at most 0. Target, argmax, top-k and candidates
/// all use this function, so equal logits give bit-identical results and the order of logits is
/// preserved.
LOGPROBD_HOST_DEVICE inline float LogprobOf(float logit, float log2_scale,
                                            const RowNormalizer& row) {
  if (!row.finite) return NAN;
  const double u = static_cast<double>(logit) * static_cast<double>(log2_scale) -
                   static_cast<double>(row.exponent);
  return static_cast<float>(fmin(kLn2 * (u - row.log2_sum), 0.0));
}

/// Returns the entropy in nats, in [0, ln vocab_size].
LOGPROBD_HOST_DEVICE inline float EntropyOf(const RowSums& sums, const RowNormalizer& row,
                                            int64_t vocab_size) {
  if (!row.finite) return NAN;
  const double entropy =
      kLn2 * (row.log2_sum - static_cast<double>(sums.weighted) / static_cast<double>(sums.sum));
  return static_cast<float>(fmin(fmax(entropy, 0.0), log(static_cast<double>(vocab_size))));
}

/// Returns ln of the sum of exp(z / temperature), in nats.
LOGPROBD_HOST_DEVICE inline double ExactLseOf(const RowNormalizer& row) {
  if (!row.finite) return NAN;
  return kLn2 * (static_cast<double>(row.exponent) + row.log2_sum);
}
/// Returns ExactLseOf, rounded to fp32.
LOGPROBD_HOST_DEVICE inline float LseOf(const RowNormalizer& row) {
  return static_cast<float>(ExactLseOf(row));
}

/// Returns the rounding error of LseOf (exact minus rounded), which gradients need.
LOGPROBD_HOST_DEVICE inline float LseRestOf(const RowNormalizer& row) {
  return static_cast<float>(ExactLseOf(row) - static_cast<double>(LseOf(row)));
}

/// Returns the sum of squared probabilities, in (0, 1].
LOGPROBD_HOST_DEVICE inline float SumPSquaredOf(const RowSums& sums, const RowNormalizer& row) {
  if (!row.finite) return NAN;
  const double sum = static_cast<double>(sums.sum) / kFixedPointOne;
  const double squares = static_cast<double>(sums.sum_squares) / kFixedPointOne;
  return static_cast<float>(fmin(squares / (sum * sum), 1.0));
}

}  // namespace logprobd::kernels
