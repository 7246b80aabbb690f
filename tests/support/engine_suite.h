#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "server/base/scoring_engine.h"
#include "server/weights/head_weights.h"
#include "tests/support/engine_case.h"
#include "tests/support/in_memory_head.h"

namespace logprobd::testing {

/// Bounds on |score - reference in double precision| at temperature 1. At a temperature t < 1 they
/// are divided by t.
struct EngineTolerances {
  double logprob = 1e-4;       ///< For logits with a standard deviation of up to 3.
  double logprob_wide = 1e-4;  ///< For a standard deviation of up to 20, or a mean of hundreds.
  double entropy = 2e-4;
  double logprob_f32 = 5e-6;  ///< For fp32 hidden rows and head, and a standard deviation of 3.
};

/// An engine that the suite runs on.
struct EngineUnderTest {
  std::string name;  ///< Letters, digits and _ only.
  std::function<absl::StatusOr<std::unique_ptr<ScoringEngine>>(const HeadWeights& head,
                                                               int64_t batch_rows_max)>
      create;
  EngineTolerances tolerances;
  std::string skip_reason;  ///< Reason why this machine cannot run the engine, or empty if it can.
};

inline void PrintTo(const EngineUnderTest& engine, std::ostream* out) { *out << engine.name; }

/// The tests that every ScoringEngine passes. A test binary links the object library
/// logprobd_engine_suite, which contains the TEST_Ps, and instantiates them:
///   INSTANTIATE_TEST_SUITE_P(Cpu, EngineSuite, ::testing::ValuesIn(engines), EngineName);
class EngineSuite : public ::testing::TestWithParam<EngineUnderTest> {
 protected:
  void SetUp() override;

  /// Creates an engine. If that fails, fails the test and returns null.
  std::unique_ptr<ScoringEngine> Create(const HeadWeights& head, int64_t batch_rows_max = 64);

  const EngineTolerances& tolerances() const { return GetParam().tolerances; }

  /// Scores `inputs` and compares every output of every row with the double reference.
  void ExpectMatchesReference(const InMemoryHead& head, const EngineCase& inputs,
                              double logprob_tolerance);
};

inline std::string EngineName(const ::testing::TestParamInfo<EngineUnderTest>& info) {
  return info.param.name;
}

}  // namespace logprobd::testing
