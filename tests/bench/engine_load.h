#pragma once

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

/// Milliseconds a batch, host memory to host memory, with all of `batches` in flight until `count`
/// have ended.
absl::StatusOr<double> EngineMilliseconds(ScoringEngine& engine,
                                          std::vector<std::unique_ptr<EngineBatch>>& batches,
                                          int count);

}  // namespace logprobd::testing
