#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/dtype.h"
#include "kernels/common/row_gradient.h"
#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"
#include "kernels/row_ops/cached_gradients.h"
#include "tests/support/half_floats.h"
#include "tests/unit/kernels/chunked/device_array.h"
#include "tests/unit/kernels/common/gradient_truth.h"
#include "tests/unit/kernels/fused/sixteen_bits.h"

// Rows of logits whose exponentials are cached, their gradients in double precision, and runs of
// the kernel.
namespace logprobd::kernels::cached_case {

using logprobd::testing::DeviceArray;
using logprobd::testing::RowSoftmax;
using logprobd::testing::ScoreGradients;

inline constexpr double kScale = 0.75;  // scale of the head
/// Initial content of outputs: NaN in bf16 and in fp16.
inline constexpr uint16_t kPoison = 0x7FB7;

struct CachedRow {
  std::vector<float> logits;  ///< [vocab], before temperature, after the cap.
  float temperature = 1;
  int64_t target = 0;
  ScoreGradients upstream;
};

struct CachedCase {
  int64_t vocab_size = 0;
  float softcap = 0;
  std::vector<CachedRow> rows;

  int64_t row_tiles() const { return NumTiles(vocab_size); }
};

/// Makes random logits, targets over the whole vocabulary and upstream gradients of every kind.
inline CachedCase MakeCachedCase(int64_t num_rows, int64_t vocab_size, double stddev,
                                 float softcap = 0) {
  std::mt19937 random(static_cast<uint32_t>(num_rows * 7 + vocab_size));
  std::normal_distribution<double> normal(0, stddev);
  CachedCase c = {.vocab_size = vocab_size, .softcap = softcap, .rows = {}};
  for (int64_t i = 0; i < num_rows; ++i) {
    CachedRow row;
    row.temperature = 0.5F * static_cast<float>(1 + i % 4);
    row.target = i * 191 % vocab_size;
    row.upstream = {.lse = 0.1 * static_cast<double>(i % 3), .logprob = -1.25, .entropy = 0.5};
    for (int64_t j = 0; j < vocab_size; ++j) {
      const double z = normal(random);
      row.logits.push_back(static_cast<float>(softcap > 0 ? softcap * std::tanh(z / softcap) : z));
    }
    c.rows.push_back(row);
  }
  return c;
}

inline float ScaleOf(const CachedRow& row) { return Log2Scale(row.temperature); }

inline RowSoftmax SoftmaxOf(const CachedRow& row) {
  std::vector<double> x;
  for (const float logit : row.logits) {
    x.push_back(static_cast<double>(logit) * static_cast<double>(ScaleOf(row)) * kLn2);
  }
  return RowSoftmax(x);
}

/// The cache that the forward pass writes for a case.
struct Cache {
  std::vector<uint16_t> exponentials;  ///< [rows, row_tiles, 192] of bf16
  std::vector<int32_t> exponents;      ///< [rows, row_tiles]
};

inline Cache CacheExponentials(const CachedCase& c) {
  Cache cache;
  for (const CachedRow& row : c.rows) {
    for (int64_t tile = 0; tile < c.row_tiles(); ++tile) {
      std::vector<float> logits;
      for (int64_t j = tile * kTileColumns; j < (tile + 1) * kTileColumns; ++j) {
        logits.push_back(j < c.vocab_size ? row.logits[static_cast<size_t>(j)]
                                          : -std::numeric_limits<float>::infinity());
      }
      float largest = logits[0];
      for (const float logit : logits) {
        largest = std::isnan(logit) ? logit : std::fmax(largest, logit);
      }
      const int32_t k = TileExponent(largest, ScaleOf(row));
      const bool is_real = k != kEmptyExponent && k != kNonfiniteExponent;
      cache.exponents.push_back(is_real ? k : kEmptyExponent);
      for (const float logit : logits) {
        const float exponent =
            std::fma(logit, ScaleOf(row), is_real ? -static_cast<float>(k) : 0.0F);
        cache.exponentials.push_back(
            testing::ToBf16(exponent < -126.0F ? 0.0F : std::exp2(exponent)));
      }
    }
  }
  return cache;
}

/// Returns the gradient constants of a row, with its target and its largest logit.
inline RowGradient ConstantsOf(const CachedRow& row) {
  const RowSoftmax truth = SoftmaxOf(row);
  RowGradient constants =
      RowGradientOf(testing::UpstreamOf(row.upstream), truth.lse, truth.entropy, ScaleOf(row),
                    kScale / static_cast<double>(row.temperature));
  const auto exponent = [&](float logit) {
    return std::fma(logit, constants.log2_scale, -constants.log2_sum);
  };
  constants.target_column = static_cast<int32_t>(row.target);
  constants.target_exponent = exponent(row.logits[static_cast<size_t>(row.target)]);
  size_t best = 0;
  for (size_t j = 0; j < row.logits.size(); ++j) {
    if (row.logits[j] > row.logits[best]) best = j;
  }
  constants.max_column = static_cast<int32_t>(best);
  constants.max_exponent = exponent(row.logits[best]);
  return constants;
}

inline std::vector<RowGradient> ConstantsOf(const CachedCase& c) {
  std::vector<RowGradient> rows;
  for (const CachedRow& row : c.rows) rows.push_back(ConstantsOf(row));
  return rows;
}

/// Options of a launch. By default it computes all tiles, with rows in the order of the cache.
struct CachedAsk {
  Dtype dtype = Dtype::kBf16;
  int64_t tile_begin = 0;
  int64_t tile_end = std::numeric_limits<int64_t>::max();
  std::vector<int64_t> cached_rows = {};
  int64_t more_stride = 0;
  std::optional<int64_t> row_count = {};  ///< Content of row_count; by default row_count is null.
};

/// The exponentials of a case in device memory.
class CachedRun {
 public:
  explicit CachedRun(const CachedCase& c)
      : case_(c),
        cache_(CacheExponentials(c)),
        exponentials_(cache_.exponentials),
        exponents_(cache_.exponents) {}

  CachedGradientsParams Params(const CachedAsk& ask) const {
    CachedGradientsParams params;
    params.num_rows = static_cast<int64_t>(case_.rows.size());
    params.exponentials = reinterpret_cast<const __nv_bfloat16*>(exponentials_.data());
    params.exponents = exponents_.data();
    params.row_tiles = case_.row_tiles();
    params.tile_begin = ask.tile_begin;
    params.tile_end = std::min(ask.tile_end, params.row_tiles);
    params.softcap = case_.softcap;
    params.dtype = ask.dtype;
    params.gradient_stride = (params.tile_end - params.tile_begin) * kTileColumns + ask.more_stride;
    return params;
  }

  /// Launches the kernel, waits, and returns the gradients [rows + 1, stride] for these constants.
  /// The last row is poison.
  std::vector<uint16_t> Run(const std::vector<RowGradient>& rows, const CachedAsk& ask = {}) const {
    CachedGradientsParams params = Params(ask);
    params.num_rows = static_cast<int64_t>(rows.size());
    const DeviceArray<RowGradient> row_array(rows);
    const DeviceArray<int64_t> row_indices(ask.cached_rows.empty() ? std::vector<int64_t>(1)
                                                                   : ask.cached_rows);
    const DeviceArray<uint16_t> gradients(std::vector<uint16_t>(
        (rows.size() + 1) * static_cast<size_t>(params.gradient_stride), kPoison));
    const DeviceArray<int64_t> row_count(std::vector<int64_t>{ask.row_count.value_or(0)});
    params.rows = row_array.data();
    if (ask.row_count.has_value()) params.row_count = row_count.data();
    if (!ask.cached_rows.empty()) params.cached_rows = row_indices.data();
    params.gradients = gradients.data();
    EXPECT_EQ(LaunchCachedGradients(params, nullptr), cudaSuccess);
    return gradients.Read();
  }

 private:
  const CachedCase& case_;
  const Cache cache_;
  DeviceArray<uint16_t> exponentials_;
  DeviceArray<int32_t> exponents_;
};

/// Compares every column of the rows with the truth. Columns beyond the vocabulary must be 0.
inline void ExpectNearTruth(const CachedCase& c, const std::vector<uint16_t>& gradients,
                            Dtype dtype) {
  // An exponential is rounded to bf16, which causes a relative error of at most 2^-8 and affects
  // the logit that the kernel derives from it.
  constexpr double kExponentialError = 0x1p-8;
  constexpr double kFp32Error = 0x1p-21;
  const int64_t stride = c.row_tiles() * kTileColumns;
  for (size_t i = 0; i < c.rows.size(); ++i) {
    const CachedRow& row = c.rows[i];
    const RowSoftmax truth = SoftmaxOf(row);
    const RowGradient constants = ConstantsOf(row);
    const double gradient_scale = kScale / static_cast<double>(row.temperature);
    for (int64_t j = 0; j < stride; ++j) {
      const double gradient = static_cast<double>(testing::FromBits(
          gradients[i * static_cast<size_t>(stride) + static_cast<size_t>(j)], dtype));
      if (j >= c.vocab_size) {
        ASSERT_EQ(gradient, 0) << "row " << i << ", column " << j;
        continue;
      }
      const auto column = static_cast<size_t>(j);
      const testing::ColumnPart part = {.is_target = j == row.target};
      const bool is_exact = part.is_target || j == constants.max_column;
      const double log_error = is_exact ? 0.0 : kExponentialError;
      double slope = 1;
      double slope_error = 0;
      if (c.softcap > 0) {
        const double share = static_cast<double>(row.logits[column]) / c.softcap;
        const double share_error =
            log_error * static_cast<double>(row.temperature) / c.softcap + kFp32Error;
        slope = 1 - share * share;
        slope_error = share_error * (2 * std::fabs(share) + share_error);
      }
      const double exact = testing::TextbookGradient(truth, column, row.upstream, part);
      const double error = testing::GradientError(truth, column, row.upstream, part, log_error);
      const double expected = gradient_scale * slope * exact;
      const double off = gradient_scale * ((std::fabs(slope) + slope_error) * error +
                                           slope_error * std::fabs(exact));
      ASSERT_NEAR(gradient, expected, off + testing::HalfUlp(std::fabs(expected) + off, dtype))
          << "row " << i << ", column " << j << ", vocabulary " << c.vocab_size << ", p "
          << truth.p[column];
    }
  }
}

}  // namespace logprobd::kernels::cached_case
