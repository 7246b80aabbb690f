#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/base/scoring_engine.h"
#include "tests/support/engine_case.h"

// Functions for benchmarks that run an engine in their own process. Such benchmarks cannot use the
// load generator of logprobctl bench, which sends requests over gRPC.
namespace logprobd::testing {

/// A batch with its memory, which an engine can score for logprob and entropy any number of times.
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

/// Returns as many batches with the same inputs as the engine may have in flight.
absl::StatusOr<EngineBatches> MakeBatches(ScoringEngine& engine, const EngineCase& inputs);

/// Scores `count` batches from host memory to host memory, with all of `batches` in flight. Returns
/// the seconds until all are scored.
absl::StatusOr<double> EngineSeconds(ScoringEngine& engine, EngineBatches& batches, int count);

/// Scores `count` batches per engine. As in the server, whichever engine is free takes the next
/// batch. `batches` holds the batches of each engine. Returns the seconds until all are scored.
absl::StatusOr<double> EngineSeconds(const std::vector<std::unique_ptr<ScoringEngine>>& engines,
                                     std::vector<EngineBatches>& batches, int count);

}  // namespace logprobd::testing
