#pragma once

#include <grpcpp/alarm.h>
#include <grpcpp/completion_queue.h>

#include <cstdint>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace logprobd::client {

/// Where the thread that waits for a call takes up the call's answers itself: a thread of gRPC
/// would have to wake it.
///
///   Begin() -> operation on cq(), its tag an Operation -> Wait() runs it -> ... End()
///
/// It belongs to the requests of one blocking call (CancelScope::queue) and not to a thread: what
/// a callback starts for somebody else is not put here and cannot hold the call up. Requests of
/// the call may begin on any thread. To be held by whoever begins or ends.
class CallerQueue {
 public:
  /// Runs on the waiting thread when the operation with this address as its tag has ended.
  using Operation = absl::AnyInvocable<void() &&>;

  /// The thread that makes it is the one that waits.
  CallerQueue() = default;
  CallerQueue(const CallerQueue&) = delete;
  CallerQueue& operator=(const CallerQueue&) = delete;

  /// Announces one operation, which must follow. False: nobody waits any more. Any thread.
  [[nodiscard]] bool Begin();
  grpc::CompletionQueue* cq() { return &cq_; }

  /// The call has ended. Once; any thread.
  void End();

  /// Runs what is due, without waiting; whether there is nothing left to wait for. Before Wait().
  bool Poll();
  /// Runs operations until End() was called and none is outstanding. Once.
  void Wait();

 private:
  /// Ended, and nothing outstanding. Then nothing can begin any more.
  bool IsOver();
  void Run(void* tag);

  const std::thread::id waiter_ = std::this_thread::get_id();
  grpc::CompletionQueue cq_;

  absl::Mutex mutex_;
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_over_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t outstanding_ ABSL_GUARDED_BY(mutex_) = 0;
  Operation woken_ = [] {};
  std::optional<grpc::Alarm> alarm_;  // made by End() alone
};

}  // namespace logprobd::client
