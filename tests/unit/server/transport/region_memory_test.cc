#include "server/transport/region_memory.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_client_memory.h"

namespace logprobd::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kPage = 4'096;

TEST(RegionMemoryTest, IsZeroedPinnedAndOfWholePages) {
  FakePinning pinning;
  {
    const auto memory = RegionMemory::Create(kPage + 1, pinning);
    ASSERT_TRUE(memory.ok()) << memory.status();

    EXPECT_EQ(memory->bytes().size(), 2 * kPage);
    EXPECT_THAT(memory->bytes(), Each(std::byte{0}));
    EXPECT_TRUE(memory->is_pinned());
    EXPECT_EQ(pinning.pinned_bytes(), 2 * kPage);
  }
  EXPECT_EQ(pinning.pinned_bytes(), 0);
}

TEST(RegionMemoryTest, IsNotPinnedWithoutAGpu) {
  const auto memory = RegionMemory::Create(kPage, NoPinning::Shared());

  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_FALSE(memory->is_pinned());
}

// A memfd can take pages until the system kills processes, so Create checks the free memory first.
TEST(RegionMemoryTest, LeavesTheHostAnEighthOfItsMemory) {
  FakePinning pinning;

  const auto refused = RegionMemory::Create(15 * kPage, pinning, 16 * kPage);
  const auto taken = RegionMemory::Create(14 * kPage, pinning, 16 * kPage);

  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("the host cannot share 61440 bytes"));
  EXPECT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(RegionMemory::Create(kPage, pinning, 0).status().code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace logprobd::testing
