#include "client/cpp/caller_queue.h"

#include <grpc/support/time.h>

#include <utility>

namespace logprobd::client {

bool CallerQueue::Begin() {
  const absl::MutexLock lock(&mutex_);
  if (is_over_) return false;
  ++outstanding_;
  return true;
}

void CallerQueue::End() {
  const bool is_waiter = std::this_thread::get_id() == waiter_;
  {
    const absl::MutexLock lock(&mutex_);
    has_ended_ = true;
    // The waiting thread, which is this one, checks has_ended_ before it sleeps.
    if (is_waiter) return;
    ++outstanding_;
  }
  alarm_.emplace();
  // The alarm is set to time zero, because gRPC would round the current time up to the next
  // millisecond.
  alarm_->Set(&cq_, gpr_time_0(GPR_CLOCK_MONOTONIC), &woken_);
}

bool CallerQueue::Poll() {
  void* tag = nullptr;
  bool ok = false;
  while (!IsOver()) {
    if (cq_.AsyncNext(&tag, &ok, gpr_time_0(GPR_CLOCK_MONOTONIC)) !=
        grpc::CompletionQueue::GOT_EVENT) {
      return false;
    }
    Run(tag);
  }
  return true;
}

void CallerQueue::Wait() {
  void* tag = nullptr;
  bool ok = false;
  while (!IsOver()) {
    cq_.Next(&tag, &ok);
    Run(tag);
  }
  cq_.Shutdown();
  cq_.Next(&tag, &ok);  // gRPC requires the queue to be drained after Shutdown
}

bool CallerQueue::IsOver() {
  const absl::MutexLock lock(&mutex_);
  is_over_ = has_ended_ && outstanding_ == 0;
  return is_over_;
}

void CallerQueue::Run(void* tag) {
  // The operation is moved out first, because running it may free the memory that holds it.
  Operation operation = std::move(*static_cast<Operation*>(tag));
  std::move(operation)();
  const absl::MutexLock lock(&mutex_);
  --outstanding_;
}

}  // namespace logprobd::client
