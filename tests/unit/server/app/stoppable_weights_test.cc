#include "server/app/stoppable_weights.h"

#include <gtest/gtest.h>

#include <vector>

#include "absl/status/status.h"
#include "tests/support/in_memory_head.h"

namespace logprobd {
namespace {

TEST(StoppableWeightsTest, ReadsUntilItIsStopped) {
  const auto head = testing::MakeRandomHead({.vocab_size = 4, .hidden_size = 2});
  std::atomic<bool> stop = false;
  const StoppableWeights weights(*head, stop);
  std::vector<std::byte> row(4);

  EXPECT_TRUE(weights.ReadRows(0, 1, row.data(), 4).ok());
  EXPECT_EQ(&weights.info(), &head->info());
  stop = true;

  EXPECT_TRUE(absl::IsCancelled(weights.ReadRows(0, 1, row.data(), 4)));
}

}  // namespace
}  // namespace logprobd
