#include "server/base/heartbeat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(HeartbeatTest, IsAtWorkFromBeginToEnd) {
  Heartbeat heartbeat;
  EXPECT_FALSE(heartbeat.is_at_work());

  heartbeat.Begin();
  EXPECT_TRUE(heartbeat.is_at_work());

  heartbeat.End();
  EXPECT_FALSE(heartbeat.is_at_work());
}

TEST(HeartbeatTest, EveryBeginAndBeatMoves) {
  Heartbeat heartbeat;

  heartbeat.Begin();
  const int64_t begun = heartbeat.beats();
  heartbeat.Beat();
  const int64_t beaten = heartbeat.beats();
  heartbeat.End();
  heartbeat.Begin(3);

  EXPECT_GT(beaten, begun);
  EXPECT_GT(heartbeat.beats(), beaten);
  EXPECT_EQ(heartbeat.shard(), 3);
}

TEST(HeartbeatTest, WorkWithoutAShardForgetsTheShardBefore) {
  Heartbeat heartbeat;
  heartbeat.Begin(3);

  heartbeat.Begin();

  EXPECT_EQ(heartbeat.shard(), -1);
}

TEST(HeartbeatsTest, HoldEachHeartbeatUntilItsOwnerReleasesIt) {
  Heartbeats heartbeats;
  std::shared_ptr<Heartbeat> first = heartbeats.Add({.thread = "a", .head = ""});
  const std::shared_ptr<Heartbeat> second = heartbeats.Add({.thread = "b", .head = ""});
  EXPECT_THAT(heartbeats.All(), ElementsAre(first, second));

  first.reset();

  EXPECT_THAT(heartbeats.All(), ElementsAre(second));
}

TEST(HeartbeatsTest, AHeartbeatWithoutATableIsSeenByNobody) {
  Heartbeats heartbeats;

  const std::shared_ptr<Heartbeat> alone = AddHeartbeat(nullptr, {.thread = "a", .head = "b"});

  EXPECT_EQ(alone->owner().head, "b");
  EXPECT_THAT(heartbeats.All(), IsEmpty());
}

}  // namespace
}  // namespace logprobd
