#include "server/batching/staging_store.h"

#include <memory>
#include <utility>

#include "gtest/gtest.h"
#include "tests/support/fake_engine.h"

namespace logprobd::testing {
namespace {

TEST(StagingStoreTest, HandsOnWhatWasReturnedAlsoOnceItsEngineIsGone) {
  StagingStore store;
  auto first = std::make_unique<FakeEngine>();
  std::unique_ptr<StagingBuffer> buffer = *store.Take(0, *first, 64);
  const std::byte* const data = buffer->data();
  store.Return(0, std::move(buffer));
  first = nullptr;
  FakeEngine second;

  const auto taken = store.Take(0, second, 64);

  ASSERT_TRUE(taken.ok());
  EXPECT_EQ((*taken)->data(), data);
  EXPECT_EQ(second.staging_bytes(), 0);
  EXPECT_EQ(store.spare_bytes(), 0);
}

TEST(StagingStoreTest, AllocatesWhatNoSpareOfThisReplicaAndSizeIsThereFor) {
  StagingStore store;
  FakeEngine engine;
  ASSERT_TRUE(store.Reserve(1, engine, 64, 1).ok());
  EXPECT_EQ(store.spare_bytes(), 64);

  const auto of_other_replica = store.Take(0, engine, 64);
  const auto of_other_size = store.Take(1, engine, 63);

  EXPECT_EQ((*of_other_replica)->size_bytes(), 64);
  EXPECT_EQ((*of_other_size)->size_bytes(), 63);
  EXPECT_EQ(engine.staging_bytes(), 64 + 64 + 63);
  EXPECT_EQ(store.spare_bytes(), 64);
}

TEST(StagingStoreTest, FreesOnlyWhatDoesNotFit) {
  StagingStore store;
  FakeEngine engine;
  ASSERT_TRUE(store.Reserve(0, engine, 64, 2).ok());
  ASSERT_TRUE(store.Reserve(0, engine, 10, 1).ok());
  ASSERT_TRUE(store.Reserve(1, engine, 64, 1).ok());

  store.FreeAllBut(/*num_replicas=*/1, 64);

  EXPECT_EQ(store.spare_bytes(), 2 * 64);
}

TEST(StagingStoreTest, SaysThatThereIsNoMemoryToReserve) {
  StagingStore store;
  FakeEngine engine({.staging_bytes_max = 100});

  EXPECT_EQ(store.Reserve(0, engine, 64, 2).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace logprobd::testing
