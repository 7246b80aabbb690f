#include "server/batching/device_turns.h"

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::Optional;

constexpr int kA = 0;
constexpr int kB = 1;
constexpr int kC = 2;

DeviceTurns::Lane On(std::vector<std::string> devices) { return {.devices = std::move(devices)}; }

/// Returns a replica on several GPUs whose kernels wait for each other.
DeviceTurns::Lane Team(std::vector<std::string> devices) {
  return {.devices = std::move(devices), .waits_for_peers = true};
}

/// Tests of heads with one replica each. Records the heads that are woken, in order.
class DeviceTurnsTest : public ::testing::Test {
 protected:
  void MakeTurns(std::vector<DeviceTurns::Head> heads) {
    const auto num_heads = static_cast<int>(heads.size());
    turns_.emplace(std::move(heads));
    for (int head = 0; head < num_heads; ++head) {
      turns_->SetWake(head, [this, head] { woken_.push_back(head); });
    }
  }

  bool Take(int head, int64_t rows = 1'000) {
    const bool is_taken = turns_->Take(head, {0}).has_value();
    if (is_taken) {
      turns_->Charge(head, rows);
    }
    return is_taken;
  }

  /// Runs `num_batches` batches of heads that always have work, two in flight at a time. Returns
  /// how many batches each head had.
  std::vector<int> Flood(const std::vector<int64_t>& rows, int num_batches) {
    std::vector<int> counts(rows.size());
    std::deque<int> in_flight;
    const auto take_all = [&] {
      for (bool any = true; any;) {
        any = false;
        for (size_t head = 0; head < rows.size(); ++head) {
          if (Take(static_cast<int>(head), rows[head])) {
            ++counts[head];
            in_flight.push_back(static_cast<int>(head));
            any = true;
          }
        }
      }
    };
    for (int batch = 0; batch < num_batches; ++batch) {
      take_all();
      turns_->GiveBack(in_flight.front(), 0);
      in_flight.pop_front();
    }
    for (const int head : in_flight) {
      turns_->GiveBack(head, 0);
    }
    for (size_t head = 0; head < rows.size(); ++head) {
      turns_->Withdraw(static_cast<int>(head));
    }
    return counts;
  }

  std::optional<DeviceTurns> turns_;
  std::vector<int> woken_;
};

TEST_F(DeviceTurnsTest, AHeadNeverWaitsForIdleNeighbours) {
  MakeTurns({{.lanes = {On({"gpu0"})}}, {.lanes = {On({"gpu0"})}}});

  for (int batch = 0; batch < 10; ++batch) {
    EXPECT_TRUE(Take(kA));
    EXPECT_TRUE(Take(kA));
    turns_->GiveBack(kA, 0);
    turns_->GiveBack(kA, 0);
  }
}

TEST_F(DeviceTurnsTest, AWaitingHeadIsWokenAndServedNext) {
  MakeTurns({{.lanes = {On({"gpu0"})}}, {.lanes = {On({"gpu0"})}}});
  Take(kA);
  Take(kA);
  EXPECT_FALSE(Take(kB));
  EXPECT_THAT(woken_, ElementsAre());

  turns_->GiveBack(kA, 0);

  EXPECT_THAT(woken_, ElementsAre(kB));
  EXPECT_FALSE(Take(kA));  // The turn is kept for B.
  EXPECT_TRUE(Take(kB));
}

TEST_F(DeviceTurnsTest, BothHaveABatchInFlightWhenBothHaveWork) {
  MakeTurns({{.lanes = {On({"gpu0"})}}, {.lanes = {On({"gpu0"})}}});

  EXPECT_TRUE(Take(kA));
  EXPECT_TRUE(Take(kB));
  EXPECT_FALSE(Take(kA));
  EXPECT_FALSE(Take(kB));
}

TEST_F(DeviceTurnsTest, SharesTheDeviceByWork) {
  MakeTurns(
      {{.lanes = {On({"gpu0"})}, .row_cost = 4e8}, {.lanes = {On({"gpu0"})}, .row_cost = 1e8}});

  const std::vector<int> counts = Flood({1'000, 1'000}, 500);

  EXPECT_NEAR(counts[kA], 100, 2);
  EXPECT_NEAR(counts[kB], 400, 3);
}

TEST_F(DeviceTurnsTest, SharesTheDeviceAmongManyHeads) {
  std::vector<DeviceTurns::Head> heads(5, {.lanes = {On({"cpu"})}});
  MakeTurns(heads);

  const std::vector<int> counts = Flood({8'000, 8'000, 8'000, 800, 80'000}, 2'000);

  for (const auto& [head, rows] : {std::pair{0, 8'000}, {1, 8'000}, {2, 8'000}, {3, 800}}) {
    EXPECT_NEAR(counts[static_cast<size_t>(head)] * rows, counts[4] * 80'000, 170'000) << head;
  }
}

TEST_F(DeviceTurnsTest, ABatchOfFewRowsCountsForTheWholeWeightThatItReads) {
  MakeTurns({{.lanes = {On({"gpu0"})}}, {.lanes = {On({"gpu0"})}}});

  const std::vector<int> counts = Flood({1, DeviceTurns::kBatchRowsMin}, 100);

  EXPECT_NEAR(counts[kA], counts[kB], 2);
}

TEST_F(DeviceTurnsTest, AnIdleHeadSavesUpNoTurns) {
  MakeTurns({{.lanes = {On({"gpu0"})}}, {.lanes = {On({"gpu0"})}}});
  for (int batch = 0; batch < 1'000; ++batch) {
    ASSERT_TRUE(Take(kA));
    turns_->GiveBack(kA, 0);
  }

  const std::vector<int> counts = Flood({1'000, 1'000}, 100);

  EXPECT_NEAR(counts[kA], counts[kB], 3);  // B does not catch up on the thousand batches.
}

// Regression: a head with a few one-row clients saved up turns; after an hour it could use the
// device alone for an hour.
TEST_F(DeviceTurnsTest, AHeadWithLittleToDoDoesNotSaveUpTurns) {
  MakeTurns({{.lanes = {On({"gpu0"})}}, {.lanes = {On({"gpu0"})}}});
  ASSERT_TRUE(Take(kA, 1));
  for (int batch = 0; batch < 1'000; ++batch) {
    ASSERT_TRUE(Take(kA, 1));  // The batch in flight has not ended yet.
    turns_->GiveBack(kA, 0);
    ASSERT_TRUE(Take(kB, 8'192));
    turns_->GiveBack(kB, 0);
  }

  const std::vector<int> counts = Flood({8'192, 8'192}, 40);

  EXPECT_NEAR(counts[kA], counts[kB], 4);
}

TEST_F(DeviceTurnsTest, AHeadWithABatchInFlightMayBeBehindByTwoOfTheLargestBatches) {
  MakeTurns({{.lanes = {On({"gpu0"})}}, {.lanes = {On({"gpu0"})}}});
  ASSERT_TRUE(Take(kB, 10'000));  // the largest
  turns_->GiveBack(kB, 0);
  ASSERT_TRUE(Take(kA));
  for (int batch = 0; batch < 5; ++batch) {
    ASSERT_TRUE(Take(kB));
    turns_->GiveBack(kB, 0);
  }
  ASSERT_TRUE(Take(kA));  // Now A has received 2,000 rows and B 15,000.
  ASSERT_FALSE(Take(kB));
  int num_of_a = 0;

  do {
    turns_->GiveBack(kA, 0);
  } while (Take(kA) && ++num_of_a < 100);

  EXPECT_EQ(num_of_a, 13);
}

TEST_F(DeviceTurnsTest, ExcessWorkStillCountsAfterAHeadWasIdle) {
  MakeTurns({{.lanes = {On({"gpu0"})}}, {.lanes = {On({"gpu0"})}}});
  ASSERT_TRUE(Take(kB));
  ASSERT_TRUE(Take(kA, 10'000));
  turns_->GiveBack(kA, 0);
  ASSERT_TRUE(Take(kB));  // Now A is idle and is ahead by 8,000 rows.
  int num_of_b = 0;

  while (!Take(kA) && num_of_b < 100) {
    turns_->GiveBack(kB, 0);
    num_of_b += Take(kB) ? 1 : 0;
  }

  EXPECT_EQ(num_of_b, 8);
}

TEST_F(DeviceTurnsTest, AHeadThatNoLongerWaitsLetsOthersContinue) {
  MakeTurns({{.lanes = {On({"gpu0"})}}, {.lanes = {On({"gpu0"})}}});
  Take(kA);
  Take(kA);
  Take(kB);
  turns_->GiveBack(kA, 0);
  ASSERT_FALSE(Take(kA));
  woken_.clear();

  turns_->Withdraw(kB);

  EXPECT_THAT(woken_, ElementsAre(kA));
  EXPECT_TRUE(Take(kA));
}

TEST_F(DeviceTurnsTest, WakesAHeadOnceUntilItAsksAgain) {
  MakeTurns({{.lanes = {On({"gpu0"})}}, {.lanes = {On({"gpu0"})}}});
  Take(kA);
  Take(kA);
  Take(kB);

  turns_->GiveBack(kA, 0);
  turns_->GiveBack(kA, 0);

  EXPECT_THAT(woken_, ElementsAre(kB));
}

TEST_F(DeviceTurnsTest, WakesNoHeadWithoutAWakeFunction) {
  MakeTurns({{.lanes = {On({"gpu0"})}}, {.lanes = {On({"gpu0"})}}});
  Take(kA);
  Take(kA);
  Take(kB);
  turns_->SetWake(kB, nullptr);

  turns_->GiveBack(kA, 0);

  EXPECT_THAT(woken_, ElementsAre());
}

TEST_F(DeviceTurnsTest, HeadsThatShareNoDeviceDoNotAffectEachOther) {
  MakeTurns({{.lanes = {On({"gpu0"})}}, {.lanes = {On({"gpu1"})}}, {.lanes = {On({"gpu0"})}}});

  EXPECT_TRUE(Take(kA));
  EXPECT_TRUE(Take(kA));
  EXPECT_FALSE(Take(kC));
  EXPECT_TRUE(Take(kB));
  EXPECT_TRUE(Take(kB));
}

TEST_F(DeviceTurnsTest, AHeadUsesAnotherReplicaWhenOneIsBusy) {
  MakeTurns({{.lanes = {On({"gpu0"})}}, {.lanes = {On({"gpu0"}), On({"gpu1"})}}});
  Take(kA);
  Take(kA);

  EXPECT_THAT(turns_->Take(kB, {0, 1}), Optional(1));
  EXPECT_THAT(turns_->Take(kB, {1, 0}), Optional(1));
  EXPECT_EQ(turns_->Take(kB, {0}), std::nullopt);
}

TEST_F(DeviceTurnsTest, ReplicasOnOneDeviceHaveAllTheirBatchesInFlight) {
  MakeTurns({{.lanes = {On({"cpu"}), On({"cpu"})}}, {.lanes = {On({"cpu"})}}});

  EXPECT_THAT(turns_->Take(kA, {0, 1}), Optional(0));
  EXPECT_THAT(turns_->Take(kA, {1, 0}), Optional(1));
  EXPECT_THAT(turns_->Take(kA, {0, 1}), Optional(0));
  EXPECT_THAT(turns_->Take(kA, {1, 0}), Optional(1));
  EXPECT_FALSE(Take(kB));
}

TEST_F(DeviceTurnsTest, ReplicasOfPeersThatShareADeviceAreNeverInFlightTogether) {
  MakeTurns({{.lanes = {Team({"gpu0", "gpu1"})}}, {.lanes = {Team({"gpu1", "gpu2"})}}});
  ASSERT_TRUE(Take(kA));
  EXPECT_FALSE(Take(kB));
  EXPECT_TRUE(Take(kA));   // A keeps its devices for two batches.
  EXPECT_FALSE(Take(kA));  // Then it is B's turn.

  turns_->GiveBack(kA, 0);
  EXPECT_FALSE(Take(kA));
  EXPECT_FALSE(Take(kB));
  turns_->GiveBack(kA, 0);

  EXPECT_THAT(woken_, ElementsAre(kB));
  EXPECT_TRUE(Take(kB));
  EXPECT_TRUE(Take(kB));
  EXPECT_FALSE(Take(kB));
  EXPECT_FALSE(Take(kA));
}

TEST_F(DeviceTurnsTest, EveryHoldOfReplicasOfPeersLastsForTwoBatches) {
  MakeTurns({{.lanes = {Team({"gpu0", "gpu1"})}}, {.lanes = {Team({"gpu1", "gpu2"})}}});
  EXPECT_TRUE(Take(kA));

  for (int round = 0; round < 3; ++round) {
    for (const auto& [holder, other] : {std::pair{kA, kB}, {kB, kA}}) {
      EXPECT_FALSE(Take(other)) << round;
      EXPECT_TRUE(Take(holder)) << round;
      EXPECT_FALSE(Take(holder)) << round;
      turns_->GiveBack(holder, 0);
      EXPECT_FALSE(Take(other)) << round;
      turns_->GiveBack(holder, 0);
      EXPECT_TRUE(Take(other)) << round;
    }
  }
}

TEST_F(DeviceTurnsTest, ASingleReplicaOfPeersKeepsItsDevicesBusy) {
  MakeTurns({{.lanes = {Team({"gpu0", "gpu1"})}}, {.lanes = {Team({"gpu0", "gpu1"})}}});
  ASSERT_TRUE(Take(kA));

  for (int batch = 0; batch < 10; ++batch) {
    EXPECT_TRUE(Take(kA));
    turns_->GiveBack(kA, 0);
  }
}

TEST_F(DeviceTurnsTest, AHeadOnOneDeviceRunsTogetherWithAReplicaOfPeers) {
  MakeTurns({{.lanes = {Team({"gpu0", "gpu1"})}}, {.lanes = {On({"gpu1"})}}});

  EXPECT_TRUE(Take(kA));
  EXPECT_TRUE(Take(kB));
}

TEST_F(DeviceTurnsTest, AReplicaOfPeersGetsItsDevicesAmongHeadsOnEach) {
  MakeTurns(
      {{.lanes = {Team({"gpu0", "gpu1"})}}, {.lanes = {On({"gpu0"})}}, {.lanes = {On({"gpu1"})}}});
  Take(kB);
  Take(kB);
  Take(kC);
  Take(kC);
  ASSERT_FALSE(Take(kA));

  turns_->GiveBack(kB, 0);
  EXPECT_FALSE(Take(kB));  // gpu0 is kept for A, which still waits for gpu1.
  turns_->GiveBack(kC, 0);

  EXPECT_THAT(woken_, ElementsAre(kA));
  EXPECT_TRUE(Take(kA));
}

}  // namespace
}  // namespace logprobd
