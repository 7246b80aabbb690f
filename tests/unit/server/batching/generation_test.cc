#include "server/batching/generation.h"

#include <memory>

#include "gtest/gtest.h"
#include "server/batching/staging_store.h"
#include "tests/support/fake_engine.h"

// Where a generation's staging comes from and goes to.

namespace logprobd::testing {
namespace {

class GenerationTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Generation>> Make(FakeEngine& first, FakeEngine& second) {
    return Generation::Create({.batch_rows_max = 8, .staging = &store_}, {&first, &second});
  }

  static constexpr int64_t kBytes = 2 * 2 * 8 * 4 * 2;  // of two replicas, in bf16

  StagingStore store_;
};

TEST_F(GenerationTest, LeavesItsStagingToTheNextOne) {
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

TEST_F(GenerationTest, FreesSparesOfAnotherSizeAndAllocatesItsOwn) {
  FakeEngine old_first, old_second;
  *Make(old_first, old_second) = nullptr;
  FakeEngine first({.dtype = Dtype::kF32}), second({.dtype = Dtype::kF32});

  const auto next = Make(first, second);

  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(store_.spare_bytes(), 0);
  EXPECT_EQ(first.staging_bytes() + second.staging_bytes(), 2 * kBytes);
}

TEST_F(GenerationTest, ThatCannotBeMadeGivesBackWhatItTook) {
  FakeEngine first, second({.staging_bytes_max = 0});
  ASSERT_TRUE(store_.Reserve(0, first, kBytes / 4, 2).ok());

  EXPECT_EQ(Make(first, second).status().code(), absl::StatusCode::kResourceExhausted);

  EXPECT_EQ(store_.spare_bytes(), kBytes / 2);
}

}  // namespace
}  // namespace logprobd::testing
