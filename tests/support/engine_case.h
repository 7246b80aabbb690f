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

/// Rows to score: a ScoreBatch that owns its inputs.
struct EngineCase {
  Dtype dtype = Dtype::kBf16;
  int64_t hidden_size = 0;
  std::vector<std::byte> hidden;            ///< [rows, hidden_size] of dtype
  std::vector<int32_t> targets;             ///< [rows]
  std::vector<float> temperatures;          ///< [rows]
  std::vector<float> entropy_temperatures;  ///< [rows], or empty
  OutputSet outputs = OutputSet(OutputSet::kAllBits);
  int32_t top_k = 0;
  std::vector<int32_t> candidate_rows;  ///< Ascending.
  std::vector<int32_t> candidate_ids;

  int64_t num_rows() const { return static_cast<int64_t>(targets.size()); }
};

/// Unit normal hidden rows, targets over the whole vocabulary, temperature 1, every output.
EngineCase MakeRandomCase(const InMemoryHead& head, int64_t num_rows, Dtype dtype = Dtype::kBf16,
                          uint64_t seed = 1);

/// The rows of `all` named by `rows`, in that order, with their temperatures and candidates.
EngineCase SelectRows(const EngineCase& all, absl::Span<const int64_t> rows);

/// What an engine made of an EngineCase; arrays as in ScoreBatch, filled with a poison before.
struct EngineScores {
  absl::Status status;
  std::vector<float> logprob;
  std::vector<float> entropy;
  std::vector<float> lse;
  std::vector<int32_t> argmax_id;
  std::vector<float> argmax_logprob;
  std::vector<float> sum_p_squared;
  std::vector<float> max_logit;
  std::vector<float> min_logit;
  std::vector<int32_t> top_k_ids;
  std::vector<float> top_k_logprobs;
  std::vector<float> candidate_logprobs;
  std::vector<uint8_t> nonfinite;
};

/// What results hold before an engine writes them; no score has this value.
inline constexpr float kPoison = -12345.5F;
inline constexpr int32_t kPoisonId = -77777;

/// An EngineCase that is being scored. Must live until Wait() has returned.
class StartedCase {
 public:
  StartedCase(ScoringEngine& engine, const EngineCase& inputs);
  ~StartedCase();
  StartedCase(const StartedCase&) = delete;
  StartedCase& operator=(const StartedCase&) = delete;

  /// Blocks until the engine is done.
  EngineScores Wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Scores `inputs` in one batch.
EngineScores RunCase(ScoringEngine& engine, const EngineCase& inputs);

/// Row `row` of `inputs` in double precision.
kernels::RowReference ReferenceOf(const InMemoryHead& head, const EngineCase& inputs, int64_t row);

/// Every bit that row `row` got for the outputs in `outputs` and, with `with_lists`, for top-k and
/// candidates, as text: equal texts mean equal bits.
std::string BitsOfRow(const EngineCase& inputs, const EngineScores& scores, int64_t row,
                      OutputSet outputs, bool with_lists);

}  // namespace logprobd::testing
