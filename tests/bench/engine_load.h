#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/base/scoring_engine.h"
#include "tests/support/engine_case.h"

namespace logprobd::testing {

/// A batch that an engine scores again and again for logprob and entropy, with its memory.
struct EngineBatch {
  std::unique_ptr<StagingBuffer> staging;
  EngineCase inputs;
  std::vector<float> logprob;
  std::vector<float> entropy;
  std::vector<uint8_t> nonfinite;
  ScoreBatch batch;
};

absl::StatusOr<std::unique_ptr<EngineBatch>> MakeBatch(ScoringEngine& engine,
                                                       const EngineCase& inputs);

/// Scores batches, host memory to host memory and all of `batches` in flight, as long as `left` is
/// above 0; each takes one of it. Returns when they have ended.
absl::Status ScoreWhileLeft(ScoringEngine& engine,
                            std::vector<std::unique_ptr<EngineBatch>>& batches,
                            std::atomic<int>& left);

/// Milliseconds a batch of `count`.
absl::StatusOr<double> EngineMilliseconds(ScoringEngine& engine,
                                          std::vector<std::unique_ptr<EngineBatch>>& batches,
                                          int count);

}  // namespace logprobd::testing
