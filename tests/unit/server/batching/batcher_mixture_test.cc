#include "tests/unit/server/batching/batcher_mixture.h"

#include "gtest/gtest.h"
#include "tests/support/draws.h"

namespace logprobd::testing {
namespace {

/// Makes `num_steps` events happen to the Batchers of `num_heads` heads, and then ends them.
void RunMixture(uint32_t seed, int num_heads, int num_steps) {
  SCOPED_TRACE(::testing::Message() << "LOGPROBD_TEST_SEED=" << seed);
  BatcherMixture mixture(seed, num_heads);
  for (int step = 0; step < num_steps && !::testing::Test::HasFailure(); ++step) mixture.Step();
  if (!::testing::Test::HasFailure()) mixture.End();
  if (::testing::Test::HasFailure()) FAIL() << "after:\n  " << mixture.LastEvents();
}

TEST(BatcherMixtureTest, EveryEventOfAHeadHasTheEffectsThatFollowFromItAndNoOthers) {
  for (const uint32_t seed : SeedsOfDraws(60)) {
    RunMixture(seed, /*num_heads=*/1, /*num_steps=*/120);
    if (HasFailure()) break;
  }
}

TEST(BatcherMixtureTest, EveryEventOfHeadsThatTakeTurnsHasTheEffectsThatFollowFromItAndNoOthers) {
  for (const uint32_t seed : SeedsOfDraws(20)) {
    RunMixture(seed, /*num_heads=*/3, /*num_steps=*/200);
    if (HasFailure()) break;
  }
}

}  // namespace
}  // namespace logprobd::testing
