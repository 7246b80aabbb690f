#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/base/scoring_engine.h"
#include "tests/support/engine_case.h"

// The load loop of benches that drive an engine in their own process. The load generator of
// logprobctl bench cannot be used there, since it sends requests over gRPC.
namespace logprobd::testing {

/// A batch for logprob and entropy that an engine can score any number of times, with its memory.
struct EngineBatch {
  std::unique_ptr<StagingBuffer> staging;
  EngineCase inputs;
  std::vector<float> logprob;
  std::vector<float> entropy;
  std::vector<uint8_t> nonfinite;
  ScoreBatch batch;
};

/// The batches that one engine has in flight.
using EngineBatches = std::vector<std::unique_ptr<EngineBatch>>;

absl::StatusOr<std::unique_ptr<EngineBatch>> MakeBatch(ScoringEngine& engine,
                                                       const EngineCase& inputs);

/// Makes a batch with the same inputs for each that the engine may have in flight.
absl::StatusOr<EngineBatches> MakeBatches(ScoringEngine& engine, const EngineCase& inputs);

/// Scores `count` batches, host memory to host memory, with all of `batches` in flight. Returns the
/// seconds until they are scored.
absl::StatusOr<double> EngineSeconds(ScoringEngine& engine, EngineBatches& batches, int count);

/// Scores `count` batches per engine; whichever engine is free takes the next one, as in the
/// server. `batches` holds the batches of each engine. Returns the seconds until all are scored.
absl::StatusOr<double> EngineSeconds(const std::vector<std::unique_ptr<ScoringEngine>>& engines,
                                     std::vector<EngineBatches>& batches, int count);

}  // namespace logprobd::testing
