#pragma once

#include <cstdint>
#include <vector>

namespace logprobd::testing {

/// Kinds of hidden rows: independent, with outlier channels, or correlated.
enum class RowKind {
  kNormal,
  kOutliersEarly,   ///< Six of the first 60 channels are 20 to 50 times larger.
  kOutliersLate,    ///< Six of the last 60 channels are 20 to 50 times larger.
  kOutliersSpread,  ///< Six channels, spread over the hidden size, are 20 to 50 times larger.
  kLowRank,         ///< Sums of 32 random vectors with noise of a twentieth of their size.
  kOneSided,        ///< Magnitudes of normal values.
};

struct RowSizes {
  int64_t num_rows = 0;
  int64_t hidden_size = 0;  ///< At least 128.
};

/// Returns rows [num_rows, hidden_size] with a mean square of 1 (for kNormal, in expectation). The
/// same seed gives the same rows.
std::vector<float> MakeRows(RowKind kind, const RowSizes& sizes, uint64_t seed);

/// Returns rows that point along rows of the weight (cosine 0.96), with dot products that rise from
/// 15 to 45. `weight_rows` is [num_rows, hidden_size].
std::vector<float> MakeRowsNear(const std::vector<float>& weight_rows, const RowSizes& sizes,
                                uint64_t seed);

}  // namespace logprobd::testing
