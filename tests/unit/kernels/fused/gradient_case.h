#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/common/row_gradient.h"
#include "kernels/fused/params.h"
#include "tests/unit/kernels/common/gradient_truth.h"
#include "tests/unit/kernels/fused/fused_case.h"

namespace logprobd::testing {

/// Initial content of gradients: NaN in bf16 and in fp16.
inline constexpr uint16_t kGradientPoison = 0x7FB7;

/// A head, and rows with upstream gradients.
struct GradientCase {
  FusedCase head;
  std::vector<ScoreGradients> upstream;   ///< [num_rows]
  std::vector<float> mean_logit_weights;  ///< [vocab_size], or empty
  /// Error of a dot product relative to the largest one of its row. 0 means that dot products and
  /// logits are exact in fp32.
  double dot_error = 4e-6;

  int64_t num_tiles() const;
};

/// Makes a case with upstream gradients of every kind except the mean logit.
GradientCase MakeGradientCase(const FusedCaseSizes& sizes);

/// Returns the rows of `all` that `rows` lists, in that order.
GradientCase SelectRows(const GradientCase& all, const std::vector<int64_t>& rows);

/// Values of a row in double precision, computed from the exact inputs.
struct GradientRowTruth {
  std::vector<double> dots;
  std::vector<double> logits;  ///< Before temperature.
  RowSoftmax softmax;
};
std::vector<GradientRowTruth> TruthOf(const GradientCase& c);

/// Returns the constants of the rows, from the exact lse and entropy.
std::vector<kernels::RowGradient> ConstantsOf(const GradientCase& c,
                                              const std::vector<GradientRowTruth>& truth);

/// Boundaries of the launches in tiles. An empty list means one launch.
using TileCuts = std::vector<int64_t>;

/// A case in device memory. `rows_of_room` additional hidden rows hold NaN and may be read.
class GradientRun {
 public:
  explicit GradientRun(const GradientCase& c, int64_t rows_of_room = 0);

  /// Returns the parameters of a launch over some tiles, without gradients and their stride.
  kernels::FusedGradientParams Params(const ShardTiles& tiles = {}) const;

  /// Returns the bits of the gradients [num_rows, tiles * 192]. A write elsewhere fails the test.
  std::vector<uint16_t> Run(const TileCuts& cuts = {}, const FusedAsk& ask = {}) const;

  const std::vector<GradientRowTruth>& truth() const { return truth_; }
  const std::vector<kernels::RowGradient>& constants() const { return constants_; }
  cudaStream_t stream() const { return head_.stream(); }

 private:
  const GradientCase& case_;
  const std::vector<GradientRowTruth> truth_;
  const std::vector<kernels::RowGradient> constants_;
  FusedRun head_;
  DeviceArray<kernels::RowGradient> rows_;
  DeviceArray<float> mean_logit_weights_;
};

/// Compares every column with the truth. Allows half a unit in the last place of the element and
/// the error of fp32 logits. Columns beyond the vocabulary must be 0.
void ExpectNearTruth(const GradientCase& c, const std::vector<GradientRowTruth>& truth,
                     const std::vector<uint16_t>& gradients);

/// Runs a case and compares it with the truth.
void ExpectTrueGradients(const GradientCase& c);

}  // namespace logprobd::testing
