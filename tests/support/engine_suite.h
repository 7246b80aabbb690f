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

/// Largest |score - double reference| at temperature 1; at a temperature t < 1 they grow by 1 / t.
struct EngineTolerances {
  double logprob = 1e-4;       ///< Logits of standard deviation up to 3.
  double logprob_wide = 1e-4;  ///< Up to 20, and hundreds away from 0.
  double entropy = 2e-4;
  double logprob_f32 = 5e-6;  ///< fp32 hidden and head, standard deviation 3.
};

/// An engine that the suite is to be run on.
struct EngineUnderTest {
  std::string name;  ///< Letters, digits and _ only.
  std::function<absl::StatusOr<std::unique_ptr<ScoringEngine>>(const HeadWeights& head,
                                                               int64_t batch_rows_max)>
      create;
  EngineTolerances tolerances;
  std::string skip_reason;  ///< Not empty: this machine cannot run it.
};

inline void PrintTo(const EngineUnderTest& engine, std::ostream* out) { *out << engine.name; }

/// The behaviours that every ScoringEngine has. A test binary links the object library
/// logprobd_engine_suite, which holds the TEST_Ps, and says
///   INSTANTIATE_TEST_SUITE_P(Cpu, EngineSuite, ::testing::ValuesIn(engines), EngineName);
class EngineSuite : public ::testing::TestWithParam<EngineUnderTest> {
 protected:
  void SetUp() override;

  /// Fails the test and returns null where the engine cannot be made.
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
