#include "server/transport/region_memory.h"

#include <sys/resource.h>

#include <csignal>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_client_memory.h"
#include "tests/support/few_files.h"

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

TEST(RegionMemoryTest, RoundsUpToWholePages) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

  EXPECT_EQ(RegionMemory::RoundUp(1), kPage);
  EXPECT_EQ(RegionMemory::RoundUp(kPage), kPage);
  EXPECT_EQ(RegionMemory::RoundUp(kPage + 1), 2 * kPage);
  EXPECT_EQ(RegionMemory::RoundUp(kMost - kPage), kMost - (kPage - 1));
  EXPECT_EQ(RegionMemory::RoundUp(kMost), kMost - (kPage - 1));
}

/// Returns the number of mappings of regions that this process has.
int CountMappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += absl::StrContains(line, "logprobd-region") ? 1 : 0;
  }
  return count;
}

TEST(RegionMemoryTest, LeavesNoMappingAndNoFileBehind) {
  FakePinning pinning;
  const int num_open = CountOpenFiles();
  {
    auto memory = RegionMemory::Create(kPage, pinning);
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ(CountMappings(), 1);
    EXPECT_EQ(CountOpenFiles(), num_open + 1);
    RegionMemory moved = *std::move(memory);
    EXPECT_EQ(CountMappings(), 1);
    moved.TakeFile();
    EXPECT_EQ(CountOpenFiles(), num_open);
    EXPECT_EQ(pinning.pinned_bytes(), kPage);
  }
  EXPECT_EQ(CountMappings(), 0);
  EXPECT_EQ(pinning.pinned_bytes(), 0);

  pinning.FailWith(absl::ResourceExhaustedError("no more memory to pin"));
  EXPECT_EQ(RegionMemory::Create(kPage, pinning).status().message(), "no more memory to pin");
  EXPECT_EQ(CountMappings(), 0);
  EXPECT_EQ(CountOpenFiles(), num_open);
}

}  // namespace
}  // namespace logprobd::testing
