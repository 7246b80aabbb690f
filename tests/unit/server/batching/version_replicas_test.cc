#include "server/batching/version_replicas.h"

#include <memory>

#include "gtest/gtest.h"
#include "server/batching/staging_store.h"
#include "tests/support/fake_engine.h"

namespace logprobd::testing {
namespace {

class VersionReplicasTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<VersionReplicas>> Make(FakeEngine& first, FakeEngine& second) {
    return VersionReplicas::Create({.batch_rows_max = 8, .staging = &store_}, {&first, &second});
  }

  static constexpr int64_t kBytes = 2 * 2 * 8 * 4 * 2;  // of two replicas, in bf16

  StagingStore store_;
};

TEST_F(VersionReplicasTest, LeavesItsStagingToTheNextOne) {
  FakeEngine old_first, old_second, first, second;
  auto old = Make(old_first, old_second);
  ASSERT_TRUE(old.ok()) << old.status();
  EXPECT_EQ(store_.spare_bytes(), 0);
  old->reset();
  EXPECT_EQ(store_.spare_bytes(), kBytes);

  const auto next = Make(first, second);

  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ((*next)->staging_bytes(), kBytes);
  EXPECT_EQ(store_.spare_bytes(), 0);
  EXPECT_EQ(first.staging_bytes() + second.staging_bytes(), 0);
}

TEST_F(VersionReplicasTest, FreesSparesOfAnotherSizeAndAllocatesItsOwn) {
  FakeEngine old_first, old_second;
  *Make(old_first, old_second) = nullptr;
  FakeEngine first({.dtype = Dtype::kF32}), second({.dtype = Dtype::kF32});

  const auto next = Make(first, second);

  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(store_.spare_bytes(), 0);
  EXPECT_EQ(first.staging_bytes() + second.staging_bytes(), 2 * kBytes);
}

// The next batch waited for the first replica, though the second fell idle before it.
TEST_F(VersionReplicasTest, OfReplicasWithAsManyBatchesTakesTheOneThatIsIdleFirst) {
  FakeEngine first, second;
  const auto generation = Make(first, second);
  ASSERT_TRUE(generation.ok()) << generation.status();
  const absl::Time begin = absl::FromUnixSeconds(0);
  const absl::Duration batches[] = {absl::Milliseconds(9), absl::Milliseconds(2)};
  for (size_t i = 0; i < 2; ++i) {
    VersionReplicas::Replica& replica = *(*generation)->replicas[i];
    replica.NoteBegin(begin);
    replica.NoteEnd(begin + batches[i]);
    replica.NoteBegin(begin + absl::Seconds(1));
    (*generation)->slots[2 * i]->state = VersionReplicas::SlotState::kInFlight;
  }

  EXPECT_EQ((*generation)->FindFreeSlot()->replica.index, 1);
}

TEST_F(VersionReplicasTest, ThatCannotBeMadeGivesBackWhatItTook) {
  FakeEngine first, second({.staging_bytes_max = 0});
  ASSERT_TRUE(store_.Reserve(0, first, kBytes / 4, 2).ok());

  EXPECT_EQ(Make(first, second).status().code(), absl::StatusCode::kResourceExhausted);

  EXPECT_EQ(store_.spare_bytes(), kBytes / 2);
}

}  // namespace
}  // namespace logprobd::testing
