#include "tests/bench/synthetic_rows.h"

#include <cmath>
#include <numeric>
#include <span>

#include "tests/support/in_memory_head.h"

namespace logprobd::testing {
namespace {

constexpr float kOutlierFactors[] = {20, 26, 32, 38, 44, 50};
constexpr int64_t kNumOutliers = 6;
/// Number of channels between neighbouring outliers of kOutliersEarly and kOutliersLate.
constexpr int64_t kOutlierStep = 11;
/// Number of channels between the end of the row and the first of these outliers.
constexpr int64_t kOutlierBegin = 2;
constexpr int64_t kRank = 32;
constexpr float kLowRankNoise = 0.05F;
constexpr float kNearNoise = 0.3F;
constexpr double kNearLogitLow = 15;
constexpr double kNearLogitHigh = 45;

int64_t OutlierChannel(RowKind kind, int64_t outlier, int64_t hidden_size) {
  if (kind == RowKind::kOutliersSpread) return (2 * outlier + 1) * hidden_size / (2 * kNumOutliers);
  const int64_t from_end = kOutlierBegin + kOutlierStep * outlier;
  return kind == RowKind::kOutliersEarly ? from_end : hidden_size - 1 - from_end;
}

double Dot(std::span<const float> a, std::span<const float> b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

void Scale(std::span<float> row, double factor) {
  for (float& value : row) value = static_cast<float>(value * factor);
}

void ToUnitMeanSquare(std::span<float> row) {
  Scale(row, std::sqrt(static_cast<double>(row.size()) / Dot(row, row)));
}

std::span<float> Row(std::vector<float>& rows, int64_t row, int64_t hidden_size) {
  return std::span(rows).subspan(static_cast<size_t>(row * hidden_size),
                                 static_cast<size_t>(hidden_size));
}

void AddLowRank(std::span<float> row, std::vector<float>& basis,
                std::span<const float> coefficients) {
  Scale(row, kLowRankNoise);
  for (size_t i = 0; i < coefficients.size(); ++i) {
    const auto along = Row(basis, static_cast<int64_t>(i), static_cast<int64_t>(row.size()));
    const float factor = coefficients[i] / std::sqrt(static_cast<float>(kRank));
    for (size_t k = 0; k < row.size(); ++k) row[k] += factor * along[k];
  }
}

}  // namespace

std::vector<float> MakeRows(RowKind kind, const RowSizes& sizes, uint64_t seed) {
  std::vector<float> rows = NormalValues(sizes.num_rows * sizes.hidden_size, 3 * seed);
  std::vector<float> basis = NormalValues(kRank * sizes.hidden_size, 3 * seed + 1);
  std::vector<float> coefficients = NormalValues(sizes.num_rows * kRank, 3 * seed + 2);
  for (int64_t i = 0; i < sizes.num_rows; ++i) {
    const std::span<float> row = Row(rows, i, sizes.hidden_size);
    switch (kind) {
      case RowKind::kNormal:
        continue;
      case RowKind::kOutliersEarly:
      case RowKind::kOutliersLate:
      case RowKind::kOutliersSpread:
        for (int64_t j = 0; j < kNumOutliers; ++j) {
          row[static_cast<size_t>(OutlierChannel(kind, j, sizes.hidden_size))] *=
              kOutlierFactors[j];
        }
        break;
      case RowKind::kLowRank:
        AddLowRank(row, basis, Row(coefficients, i, kRank));
        break;
      case RowKind::kOneSided:
        for (float& value : row) value = std::fabs(value);
        break;
    }
    ToUnitMeanSquare(row);
  }
  return rows;
}

std::vector<float> MakeRowsNear(const std::vector<float>& weight_rows, const RowSizes& sizes,
                                uint64_t seed) {
  std::vector<float> along = weight_rows;
  std::vector<float> rows = NormalValues(sizes.num_rows * sizes.hidden_size, seed);
  for (int64_t i = 0; i < sizes.num_rows; ++i) {
    const std::span<float> row = Row(rows, i, sizes.hidden_size);
    const std::span<float> direction = Row(along, i, sizes.hidden_size);
    const double size = std::sqrt(Dot(direction, direction) / static_cast<double>(row.size()));
    for (size_t k = 0; k < row.size(); ++k) {
      row[k] = kNearNoise * row[k] + static_cast<float>(direction[k] / size);
    }
    const double logit = kNearLogitLow + (kNearLogitHigh - kNearLogitLow) * static_cast<double>(i) /
                                             static_cast<double>(sizes.num_rows);
    Scale(row, logit / Dot(row, direction));
  }
  return rows;
}

}  // namespace logprobd::testing
