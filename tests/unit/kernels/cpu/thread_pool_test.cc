#include "kernels/cpu/thread_pool.h"

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <system_error>
#include <thread>
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

/// Waits until `count` threads have arrived. Returns false after a minute.
class Meeting {
 public:
  explicit Meeting(int32_t count) : missing_(count) {}
  bool Arrive() {
    std::unique_lock lock(mutex_);
    if (--missing_ == 0) all_here_.notify_all();
    return all_here_.wait_for(lock, std::chrono::minutes(1), [this] { return missing_ <= 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  int32_t missing_;
};

TEST(ThreadPoolTest, EveryThreadTakesPartInEveryLoop) {
  ThreadPool pool(3);
  for (int round = 0; round < 3; ++round) {
    Meeting meeting(3);
    std::atomic<int> met = 0;
    std::vector<std::atomic<int>> units_of(3);

    pool.ForEach(3, [&](int64_t /*unit*/, int32_t worker) {
      units_of[static_cast<size_t>(worker)].fetch_add(1);
      if (meeting.Arrive()) met.fetch_add(1);
    });

    EXPECT_EQ(met.load(), 3);
    for (const auto& units : units_of) EXPECT_EQ(units.load(), 1);
  }
}

TEST(ThreadPoolTest, ForEachWaitsForTheUnitsOfOtherThreads) {
  ThreadPool pool(2);
  for (int round = 0; round < 20; ++round) {
    Meeting both_began(2);
    std::atomic<bool> is_done = false;

    pool.ForEach(2, [&](int64_t /*unit*/, int32_t worker) {
      both_began.Arrive();
      if (worker == 0) return;
      for (int i = 0; i < 100; ++i) std::this_thread::yield();  // the caller has nothing left to do
      is_done.store(true);
    });

    ASSERT_TRUE(is_done.load());
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
