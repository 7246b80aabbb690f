#include "server/batching/task_pool.h"

#include <atomic>
#include <vector>

#include "absl/synchronization/barrier.h"
#include "gtest/gtest.h"

namespace logprobd {
namespace {

class TaskPoolTest : public ::testing::TestWithParam<int32_t> {};

TEST_P(TaskPoolTest, RunsEveryTaskOnce) {
  TaskPool pool("task", GetParam());
  for (int64_t num_tasks : {0, 1, 2, 3, 100}) {
    std::vector<std::atomic<int>> runs(static_cast<size_t>(num_tasks));

    pool.Run(num_tasks, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });

    for (const std::atomic<int>& count : runs) {
      EXPECT_EQ(count, 1);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, TaskPoolTest, ::testing::Values(0, 1, 2, 7));

TEST(TaskPoolThreadsTest, RunsTasksOnAllItsThreadsAndTheCallers) {
  TaskPool pool("task", 2);
  auto* const barrier = new absl::Barrier(3);  // It opens when three threads wait at it.

  pool.Run(3, [&](int64_t) {
    if (barrier->Block()) {
      delete barrier;
    }
  });
}

TEST(TaskPoolThreadsTest, RunsJobAfterJob) {
  TaskPool pool("task", 3);
  std::atomic<int64_t> sum = 0;

  for (int job = 0; job < 1'000; ++job) {
    pool.Run(5, [&](int64_t i) { sum += i; });
  }

  EXPECT_EQ(sum, 10'000);
}

}  // namespace
}  // namespace logprobd
