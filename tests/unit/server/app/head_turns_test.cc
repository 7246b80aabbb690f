#include "server/app/head_turns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

ServingPlan PlanOn(Device device, std::vector<ShardPlace> layout) {
  ServingPlan plan;
  plan.head.vocab_size = 1'000;
  plan.head.hidden_size = 64;
  plan.engine.device = device;
  plan.engine.layout = std::move(layout);
  return plan;
}

ServerPlan Plan(std::vector<ServingPlan> heads) {
  ServerPlan plan;
  plan.heads = std::move(heads);
  return plan;
}

TEST(TurnHeadsTest, ThereAreNoneWhereNoDeviceIsShared) {
  EXPECT_THAT(TurnHeadsOf(Plan({PlanOn(Device::kCuda, {{0, 0, "gpu0"}, {1, 0, "gpu1"}}),
                                PlanOn(Device::kCuda, {{0, 0, "gpu2"}})})),
              IsEmpty());
  EXPECT_THAT(TurnHeadsOf(Plan({PlanOn(Device::kCpu, {{0, 0, "cpu"}, {1, 0, "cpu"}})})), IsEmpty());
}

TEST(TurnHeadsTest, EachReplicaIsALaneOnItsDevices) {
  const auto heads = TurnHeadsOf(Plan({PlanOn(Device::kCuda, {{0, 0, "gpu0"}, {1, 0, "gpu1"}}),
                                       PlanOn(Device::kCuda, {{0, 0, "gpu1"}})}));

  ASSERT_THAT(heads, SizeIs(2));
  ASSERT_THAT(heads[0].lanes, SizeIs(2));
  EXPECT_THAT(heads[0].lanes[0].devices, ElementsAre("gpu0"));
  EXPECT_THAT(heads[0].lanes[1].devices, ElementsAre("gpu1"));
  EXPECT_THAT(heads[1].lanes[0].devices, ElementsAre("gpu1"));
  EXPECT_EQ(heads[0].row_cost, 64'000);
  EXPECT_FALSE(AnyWaitsForPeers(heads));
}

TEST(TurnHeadsTest, ShardsOnGpusWaitForEachOtherAndShardsOnACpuDoNot) {
  const auto on_gpus = TurnHeadsOf(Plan({PlanOn(Device::kCuda, {{0, 0, "gpu0"}, {0, 1, "gpu1"}}),
                                         PlanOn(Device::kCuda, {{0, 0, "gpu0"}})}));
  ASSERT_THAT(on_gpus, SizeIs(2));
  EXPECT_THAT(on_gpus[0].lanes[0].devices, ElementsAre("gpu0", "gpu1"));
  EXPECT_TRUE(on_gpus[0].lanes[0].waits_for_peers);
  EXPECT_FALSE(on_gpus[1].lanes[0].waits_for_peers);
  EXPECT_TRUE(AnyWaitsForPeers(on_gpus));

  const auto on_cpu = TurnHeadsOf(Plan({PlanOn(Device::kCpu, {{0, 0, "cpu"}, {0, 1, "cpu"}}),
                                        PlanOn(Device::kCpu, {{0, 0, "cpu"}})}));
  ASSERT_THAT(on_cpu, SizeIs(2));
  EXPECT_THAT(on_cpu[0].lanes[0].devices, ElementsAre("cpu"));
  EXPECT_FALSE(AnyWaitsForPeers(on_cpu));
}

}  // namespace
}  // namespace logprobd
