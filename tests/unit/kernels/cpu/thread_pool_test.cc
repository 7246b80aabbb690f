#include "kernels/cpu/thread_pool.h"

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <system_error>
#include <vector>

#include "gtest/gtest.h"

namespace logprobd::kernels {
namespace {

TEST(ThreadPoolTest, EveryUnitRunsOnce) {
  for (const int32_t threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (const int64_t num_units : {0, 1, 2, 3, 100, 1000}) {
      std::vector<std::atomic<int>> done(static_cast<size_t>(num_units));

      pool.ForEach(num_units, [&](int64_t unit, int32_t /*worker*/) {
        done[static_cast<size_t>(unit)].fetch_add(1);
      });

      for (const auto& count : done) EXPECT_EQ(count.load(), 1);
    }
  }
}

TEST(ThreadPoolTest, NoTwoThreadsShareAWorkerNumber) {
  ThreadPool pool(4);
  std::vector<std::atomic<int>> inside(4);
  std::atomic<int> clashes = 0;

  for (int round = 0; round < 200; ++round) {
    pool.ForEach(50, [&](int64_t /*unit*/, int32_t worker) {
      std::atomic<int>& mine = inside[static_cast<size_t>(worker)];
      if (mine.fetch_add(1) != 0) clashes.fetch_add(1);
      mine.fetch_sub(1);
    });
  }

  EXPECT_EQ(clashes.load(), 0);
}

TEST(ThreadPoolTest, ForEachReturnsAfterTheLastUnit) {
  ThreadPool pool(3);
  for (int round = 0; round < 500; ++round) {
    std::vector<int> values(7, 0);  // not atomic: a thread sanitizer would see a late write

    pool.ForEach(7, [&](int64_t unit, int32_t) { values[static_cast<size_t>(unit)] = 1; });

    for (const int value : values) ASSERT_EQ(value, 1);
  }
}

// Regression: a thread that could not start ended the process, because running threads were
// destroyed.
TEST(ThreadPoolTest, ThrowsWhenThreadsCannotStart) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more address space than the limit leaves";
#endif
  const auto start_threads_without_memory = [] {
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    // Leaves room for the stacks of a few threads, not of all.
    const rlim_t bytes = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE)) + (rlim_t{64} << 20);
    const rlimit limit = {.rlim_cur = bytes, .rlim_max = bytes};
    if (setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(2);
    try {
      const ThreadPool pool(64);
    } catch (const std::system_error&) {
      std::_Exit(0);
    }
    std::_Exit(3);
  };

  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(start_threads_without_memory(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace logprobd::kernels
