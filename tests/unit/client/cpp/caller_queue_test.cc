#include "client/cpp/caller_queue.h"

#include <grpc/support/time.h>

#include <memory>
#include <thread>
#include <utility>

#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

/// An operation that completes when its alarm fires and records the thread that runs it.
struct Work {
  std::thread::id runner = {};
  CallerQueue::Operation operation;
  grpc::Alarm alarm;

  explicit Work(absl::AnyInvocable<void() &&> then = [] {})
      : operation([this, then = std::move(then)]() mutable {
          runner = std::this_thread::get_id();
          std::move(then)();
        }) {}

  bool Start(CallerQueue& queue) {
    if (!queue.Begin()) return false;
    alarm.Set(queue.cq(), gpr_time_0(GPR_CLOCK_MONOTONIC), &operation);
    return true;
  }
};

TEST(CallerQueueTest, RunsOperationsOnTheThreadThatWaits) {
  const auto queue = std::make_shared<CallerQueue>();
  Work second([&] { queue->End(); });
  Work first([&] { EXPECT_TRUE(second.Start(*queue)); });

  ASSERT_TRUE(first.Start(*queue));
  queue->Wait();

  EXPECT_EQ(first.runner, std::this_thread::get_id());
  EXPECT_EQ(second.runner, std::this_thread::get_id());
}

TEST(CallerQueueTest, WakesWhenTheCallEndsOnAnotherThread) {
  for (int repeat = 0; repeat < 500; ++repeat) {
    auto queue = std::make_shared<CallerQueue>();
    std::thread other([queue] { queue->End(); });

    queue->Wait();
    queue.reset();  // possibly before the other thread releases it

    other.join();
  }
}

TEST(CallerQueueTest, ReturnsAtOnceWhenTheCallHasEnded) {
  const auto queue = std::make_shared<CallerQueue>();

  queue->End();

  EXPECT_TRUE(queue->Poll());
  queue->Wait();
}

TEST(CallerQueueTest, WaitsForOutstandingOperationsAfterTheEnd) {
  const auto queue = std::make_shared<CallerQueue>();
  Work sibling;
  Work ending([&] { queue->End(); });
  ASSERT_TRUE(ending.Start(*queue));
  ASSERT_TRUE(queue->Begin());
  std::thread later(
      [&] { sibling.alarm.Set(queue->cq(), gpr_time_0(GPR_CLOCK_MONOTONIC), &sibling.operation); });

  queue->Wait();

  EXPECT_EQ(sibling.runner, std::this_thread::get_id());
  later.join();
}

TEST(CallerQueueTest, TakesOperationsThatOtherThreadsBegin) {
  const auto queue = std::make_shared<CallerQueue>();
  Work work([&] { queue->End(); });
  std::thread timer([&] { EXPECT_TRUE(work.Start(*queue)); });

  queue->Wait();

  EXPECT_EQ(work.runner, std::this_thread::get_id());
  timer.join();
}

TEST(CallerQueueTest, RefusesOperationsOnceTheCallIsOver) {
  const auto queue = std::make_shared<CallerQueue>();
  queue->End();
  queue->Wait();

  EXPECT_FALSE(queue->Begin());
}

TEST(CallerQueueTest, PollsWithoutWaiting) {
  const auto queue = std::make_shared<CallerQueue>();
  Work work([&] { queue->End(); });

  EXPECT_FALSE(queue->Poll());
  ASSERT_TRUE(work.Start(*queue));
  while (!queue->Poll()) {
  }

  EXPECT_EQ(work.runner, std::this_thread::get_id());
  queue->Wait();
}

// A callback of one call may make another blocking call.
TEST(CallerQueueTest, WaitsInsideAnOperationOfAnotherQueue) {
  const auto outer = std::make_shared<CallerQueue>();
  const auto inner = std::make_shared<CallerQueue>();
  Work inner_work([&] { inner->End(); });
  Work outer_work([&] {
    EXPECT_TRUE(inner_work.Start(*inner));
    inner->Wait();
    outer->End();
  });

  ASSERT_TRUE(outer_work.Start(*outer));
  outer->Wait();

  EXPECT_EQ(inner_work.runner, std::this_thread::get_id());
}

}  // namespace
}  // namespace logprobd::client
