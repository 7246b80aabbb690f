#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/common/row_gradient.h"
#include "kernels/fused_sm90/fused_gradient.h"
#include "tests/unit/kernels/common/gradient_truth.h"
#include "tests/unit/kernels/fused_sm90/fused_case.h"

namespace logprobd::testing {

/// What gradients hold before a run: NaN in bf16 and in fp16.
inline constexpr uint16_t kGradientPoison = 0x7FB7;

/// A head and rows with gradients of their scores.
struct GradientCase {
  FusedCase head;
  std::vector<ScoreGradients> upstream;   ///< [num_rows]
  std::vector<float> mean_logit_weights;  ///< [vocab_size], or empty
  /// Error of a dot product over the row's largest, as ExpectNearTruth has it for logits. 0: fp32
  /// holds dot products and logits exactly.
  double dot_error = 4e-6;

  int64_t num_tiles() const;
};

/// Upstream gradients of every kind, but of the mean logit.
GradientCase MakeGradientCase(const FusedCaseSizes& sizes);

/// The rows of `all` named by `rows`, in that order.
GradientCase CompactRows(const GradientCase& all, const std::vector<int64_t>& rows);

/// A row in double, of the exact values.
struct GradientRowTruth {
  std::vector<double> dots;
  std::vector<double> logits;  ///< Before temperature.
  RowSoftmax softmax;
};
std::vector<GradientRowTruth> TruthOf(const GradientCase& c);

/// The rows' constants, from the truth's lse and entropy.
std::vector<kernels::RowGradient> ConstantsOf(const GradientCase& c,
                                              const std::vector<GradientRowTruth>& truth);

/// Tiles of each launch, by their borders; empty: all in one.
using TileCuts = std::vector<int64_t>;

/// A case in device memory. Rows of room hold NaN and may be read.
class GradientRun {
 public:
  explicit GradientRun(const GradientCase& c, int64_t rows_of_room = 0);

  /// All that a launch over some tiles needs, but gradients and their stride.
  kernels::FusedGradientParams Params(const ShardTiles& tiles = {}) const;

  /// Gradients [num_rows, tiles * 192], as bits; the test fails where anything else is written.
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

/// Compares every column with the truth: half a last place of the element apart, and what logits in
/// fp32 cost. Columns beyond the vocabulary are 0.
void ExpectNearTruth(const GradientCase& c, const std::vector<GradientRowTruth>& truth,
                     const std::vector<uint16_t>& gradients);

/// Runs a case and compares.
void ExpectTrueGradients(const GradientCase& c);

}  // namespace logprobd::testing
