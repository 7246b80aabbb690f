#pragma once

#include <cstdint>
#include <vector>

namespace logprobd::testing {

/// Hidden rows that are not all alike along the hidden size, or not independent of one another.
enum class RowKind {
  kNormal,
  kOutliersEarly,   ///< Six channels 20 to 50 times larger, among the first 60.
  kOutliersLate,    ///< Among the last 60.
  kOutliersSpread,  ///< Over the whole hidden size.
  kLowRank,         ///< Sums of 32 random vectors, and noise of a twentieth of their size.
  kOneSided,        ///< Magnitudes of normal values.
};

struct RowSizes {
  int64_t num_rows = 0;
  int64_t hidden_size = 0;  ///< >= 128.
};

/// Rows [num_rows, hidden_size] of unit mean square (kNormal: expected); the same for a seed.
std::vector<float> MakeRows(RowKind kind, const RowSizes& sizes, uint64_t seed);

/// Rows that point where rows of the weight do (cosine 0.96), their dot products with these rising
/// from 15 to 45. `weight_rows` is [num_rows, hidden_size].
std::vector<float> MakeRowsNear(const std::vector<float>& weight_rows, const RowSizes& sizes,
                                uint64_t seed);

}  // namespace logprobd::testing
