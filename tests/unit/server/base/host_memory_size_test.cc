#include "server/base/host_memory_size.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

constexpr int64_t kKib = 1024;

/// A root of its own with 1,000 KiB, of which 700 are available.
class HostMemorySizeTest : public ::testing::Test {
 protected:
  HostMemorySizeTest() {
    std::filesystem::remove_all(root_);
    Write("proc/meminfo",
          "MemTotal:        1000 kB\nMemFree:          100 kB\nMemAvailable:     700 kB\n"
          "HugePages_Total:    0\n");
  }

  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = absl::StrCat(root_, "/", path);
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  const std::string root_ =
      absl::StrCat(::testing::TempDir(), "/host_memory_size_test_",
                   ::testing::UnitTest::GetInstance()->current_test_info()->name());
};

TEST_F(HostMemorySizeTest, IsTheMachinesWithoutAGroup) {
  const HostMemorySize size = ReadHostMemorySize(root_);

  EXPECT_EQ(size.total_bytes, 1000 * kKib);
  EXPECT_EQ(size.available_bytes, 700 * kKib);
}

TEST_F(HostMemorySizeTest, IsTheMachinesWithoutALimitOfTheGroup) {
  Write("sys/fs/cgroup/memory.max", "max\n");

  EXPECT_EQ(ReadHostMemorySize(root_).total_bytes, 1000 * kKib);
}

TEST_F(HostMemorySizeTest, IsTheGroupsWhereItsLimitIsLower) {
  Write("sys/fs/cgroup/memory.max", absl::StrCat(500 * kKib, "\n"));
  Write("sys/fs/cgroup/memory.current", absl::StrCat(120 * kKib, "\n"));

  const HostMemorySize size = ReadHostMemorySize(root_);

  EXPECT_EQ(size.total_bytes, 500 * kKib);
  EXPECT_EQ(size.available_bytes, 380 * kKib);
}

TEST_F(HostMemorySizeTest, IsUnknownWhereTheSystemDoesNotSay) {
  const HostMemorySize size = ReadHostMemorySize(absl::StrCat(root_, "/nowhere"));

  EXPECT_EQ(size.total_bytes, 0);
  EXPECT_EQ(size.available_bytes, 0);
}

TEST(ReadHostMemorySizeTest, ReadsThisMachine) {
  EXPECT_GT(ReadHostMemorySize().total_bytes, 0);
  EXPECT_LE(ReadHostMemorySize().available_bytes, ReadHostMemorySize().total_bytes);
}

}  // namespace
}  // namespace logprobd
