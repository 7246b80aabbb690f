#include "server/batching/head_turns.h"

#include <optional>

#include "gtest/gtest.h"

namespace logprobd::testing {
namespace {

/// Two heads with one replica each on the same device, which has room for two batches.
class HeadTurnsTest : public ::testing::Test {
 protected:
  DeviceTurns devices_{{{.lanes = {{.devices = {"gpu0"}}}}, {.lanes = {{.devices = {"gpu0"}}}}}};
  HeadTurns first_{&devices_, 0};
  HeadTurns second_{&devices_, 1};
};

TEST_F(HeadTurnsTest, AHeadWaitsUntilItTakesATurn) {
  EXPECT_EQ(first_.Take({0}), 0);
  EXPECT_EQ(first_.Take({0}), 0);
  bool is_woken = false;
  second_.SetWake([&] { is_woken = true; });

  EXPECT_EQ(second_.Take({0}), std::nullopt);
  EXPECT_TRUE(second_.is_waiting());
  EXPECT_FALSE(is_woken);
  first_.GiveBack(0);
  EXPECT_TRUE(is_woken);
  EXPECT_TRUE(second_.is_waiting());

  EXPECT_EQ(second_.Take({0}), 0);
  EXPECT_FALSE(second_.is_waiting());
  second_.SetWake(nullptr);
}

TEST_F(HeadTurnsTest, AHeadThatWithdrawsLeavesTheDeviceToOthers) {
  first_.Take({0});
  first_.Take({0});
  first_.Charge(1'000);
  ASSERT_EQ(second_.Take({0}), std::nullopt);
  first_.GiveBack(0);
  ASSERT_EQ(first_.Take({0}), std::nullopt);  // The room is the second head's.

  second_.Withdraw();

  EXPECT_FALSE(second_.is_waiting());
  EXPECT_EQ(first_.Take({0}), 0);
}

TEST(HeadTurnsAloneTest, AHeadThatSharesNoDeviceNeedsNoTurns) {
  HeadTurns turns(nullptr, 0);

  turns.SetWake([] { FAIL(); });
  turns.Charge(1);
  turns.Withdraw();
  turns.GiveBack(0);

  EXPECT_FALSE(turns.is_sharing());
  EXPECT_FALSE(turns.is_waiting());
}

}  // namespace
}  // namespace logprobd::testing
