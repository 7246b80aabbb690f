#include "server/base/host.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>

#include <stdexcept>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/temp_folder.h"

namespace logprobd {
namespace {

constexpr int64_t kKib = 1024;

/// Reads the sizes from a temporary root with 1,000 KiB, of which 700 KiB are available.
class HostMemorySizeTest : public ::testing::Test {
 protected:
  HostMemorySizeTest() {
    Write("proc/meminfo",
          "MemTotal:        1000 kB\nMemFree:          100 kB\nMemAvailable:     700 kB\n"
          "HugePages_Total:    0\n");
  }

  void Write(const std::string& path, const std::string& text) const { folder_.Write(path, text); }

  const testing::TempFolder folder_;
  const std::string& root_ = folder_.path();
};

TEST_F(HostMemorySizeTest, IsThatOfTheMachineWithoutAControlGroup) {
  const HostMemorySize size = ReadHostMemorySize(root_);

  EXPECT_EQ(size.total_bytes, 1000 * kKib);
  EXPECT_EQ(size.available_bytes, 700 * kKib);
}

TEST_F(HostMemorySizeTest, IsThatOfTheMachineWhenTheControlGroupHasNoLimit) {
  Write("sys/fs/cgroup/memory.max", "max\n");

  EXPECT_EQ(ReadHostMemorySize(root_).total_bytes, 1000 * kKib);
}

TEST_F(HostMemorySizeTest, IsThatOfTheControlGroupWhenItsLimitIsLower) {
  Write("sys/fs/cgroup/memory.max", absl::StrCat(500 * kKib, "\n"));
  Write("sys/fs/cgroup/memory.current", absl::StrCat(120 * kKib, "\n"));

  const HostMemorySize size = ReadHostMemorySize(root_);

  EXPECT_EQ(size.total_bytes, 500 * kKib);
  EXPECT_EQ(size.available_bytes, 380 * kKib);
}

TEST_F(HostMemorySizeTest, IsUnknownWhenTheSystemDoesNotTell) {
  const HostMemorySize size = ReadHostMemorySize(absl::StrCat(root_, "/nowhere"));

  EXPECT_EQ(size.total_bytes, 0);
  EXPECT_EQ(size.available_bytes, 0);
}

TEST(ReadHostMemorySizeTest, ReadsThisMachine) {
  EXPECT_GT(ReadHostMemorySize().total_bytes, 0);
  EXPECT_LE(ReadHostMemorySize().available_bytes, ReadHostMemorySize().total_bytes);
}

TEST(StartThreadTest, RunsItsBodyUnderItsName) {
  std::string name;

  auto thread = StartThread("a-name-of-twenty-by", [&name] {
    char buffer[16];
    pthread_getname_np(pthread_self(), buffer, sizeof(buffer));
    name = buffer;
  });

  ASSERT_TRUE(thread.ok()) << thread.status();
  thread->join();
  EXPECT_EQ(name, "a-name-of-twent");
}

void Throw() {
  auto thread = StartThread("thrower", [] { throw std::runtime_error("test exception"); });
  thread->join();
}

// Regression: the process ended without naming the thread that had thrown.
TEST(StartThreadDeathTest, AnExceptionEndsTheProcessAndIsLogged) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(Throw(), ::testing::KilledBySignal(SIGABRT),
              "thread=thrower what=\"test exception\"");
}

[[noreturn]] void StartWithoutMemory() {
  const rlimit none{1, 1};  // too small for a stack
  setrlimit(RLIMIT_AS, &none);
  std::exit(absl::IsResourceExhausted(StartThread("x", [] {}).status()) ? 0 : 1);
}

TEST(StartThreadDeathTest, ReportsThatTheSystemGivesNoThread) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer ends a process that has no memory";
#endif
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(StartWithoutMemory(), ::testing::ExitedWithCode(0), "");
}

}  // namespace

}  // namespace logprobd
