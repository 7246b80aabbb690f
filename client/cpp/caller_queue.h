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

/// A completion queue from which the thread of a blocking call receives the call's responses
/// itself, so that no gRPC thread has to wake it.
///
/// For each operation, call Begin() and then start it on cq() with the address of an Operation as
/// its tag. Wait() runs that Operation. Call End() when the call has ended.
///
/// The queue belongs to the requests of one blocking call (CancelScope::queue), not to a thread:
/// operations of other calls do not enter it and cannot delay the call. Any thread may begin
/// requests of the call. Whoever calls Begin or End must share ownership of the queue.
class CallerQueue {
 public:
  /// A function whose address is the tag of an operation on cq(). The waiting thread calls it when
  /// that operation has ended.
  using Operation = absl::AnyInvocable<void() &&>;

  /// The thread that constructs the queue must be the one that waits.
  CallerQueue() = default;
  CallerQueue(const CallerQueue&) = delete;
  CallerQueue& operator=(const CallerQueue&) = delete;

  /// Announces one operation, which must follow. Returns false if the call is over. May be called
  /// from any thread.
  [[nodiscard]] bool Begin();
  grpc::CompletionQueue* cq() { return &cq_; }

  /// Notes that the call has ended. Must be called once, from any thread.
  void End();

  /// Runs finished operations without waiting. Returns true if the call is over. Must not be called
  /// after Wait().
  bool Poll();
  /// Runs operations until End() was called and none is outstanding. Must be called once.
  void Wait();

 private:
  /// Returns whether End() was called and no operation is outstanding. From then on Begin() returns
  /// false.
  bool IsOver();
  void Run(void* tag);

  const std::thread::id waiter_ = std::this_thread::get_id();
  grpc::CompletionQueue cq_;

  absl::Mutex mutex_;
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_over_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t outstanding_ ABSL_GUARDED_BY(mutex_) = 0;
  Operation woken_ = [] {};
  std::optional<grpc::Alarm> alarm_;  // used by End() only
};

}  // namespace logprobd::client
