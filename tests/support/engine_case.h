#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/reference/row_reference.h"
#include "server/base/scoring_engine.h"
#include "tests/support/in_memory_head.h"

namespace logprobd::testing {

/// Rows to score: the inputs of a ScoreBatch, with their own memory.
struct EngineCase {
  Dtype dtype = Dtype::kBf16;
  int64_t hidden_size = 0;
  std::vector<std::byte> hidden;            ///< [rows, hidden_size] of `dtype`
  std::vector<int32_t> targets;             ///< [rows]
  std::vector<float> temperatures;          ///< [rows]
  std::vector<float> entropy_temperatures;  ///< [rows], or empty
  OutputSet outputs = OutputSet(kAllOutputBits);
  int32_t top_k = 0;
  std::vector<int32_t> candidate_rows;  ///< In ascending order.
  std::vector<int32_t> candidate_ids;

  int64_t num_rows() const { return static_cast<int64_t>(targets.size()); }
};

/// Makes rows with standard normal hidden states, targets all over the vocabulary, temperature 1
/// and all outputs.
EngineCase MakeRandomCase(const InMemoryHead& head, int64_t num_rows, Dtype dtype = Dtype::kBf16,
                          uint64_t seed = 1);

/// Copies the rows of `all` with indices `rows`, in that order, with their temperatures and
/// candidates.
EngineCase SelectRows(const EngineCase& all, absl::Span<const int64_t> rows);

/// The scores of an EngineCase. Columns that engines do not fill are empty.
struct EngineScores : ScoreColumns {
  absl::Status status;
  std::vector<uint8_t> nonfinite;
};

/// Values of all scores before an engine writes them; no real score has them.
inline constexpr float kPoison = -12345.5F;
inline constexpr int32_t kPoisonId = -77777;

/// A batch in flight with the inputs of an EngineCase, which must outlive it. The destructor waits
/// for the engine.
class StartedCase {
 public:
  StartedCase(ScoringEngine& engine, const EngineCase& inputs);
  ~StartedCase();
  StartedCase(const StartedCase&) = delete;
  StartedCase& operator=(const StartedCase&) = delete;

  /// Blocks until the engine is done, and returns the scores.
  EngineScores Wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Scores `inputs` in one batch.
EngineScores RunCase(ScoringEngine& engine, const EngineCase& inputs);

/// The logits of row `row` of `inputs` in double precision, before temperature.
std::vector<double> LogitsOf(const InMemoryHead& head, const EngineCase& inputs, int64_t row);

/// The scores of row `row` of `inputs` in double precision.
kernels::RowReference ReferenceOf(const InMemoryHead& head, const EngineCase& inputs, int64_t row);

/// All bits of the scores of row `row` for the outputs in `outputs` and, if `with_lists` is true,
/// for top-k and candidates, as text: equal texts mean equal bits.
std::string BitsOfRow(const EngineCase& inputs, const EngineScores& scores, int64_t row,
                      OutputSet outputs, bool with_lists);

}  // namespace logprobd::testing
