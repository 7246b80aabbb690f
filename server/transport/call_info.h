#pragma once

#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/server_context.h"
#include "server/base/clock.h"

namespace logprobd {

/// What a gRPC call says outside its messages.
struct CallInfo {
  std::string client_id;
  absl::Time deadline = absl::InfiniteFuture();  ///< Time of the server's Clock.
};

/// Longest client id in bytes; longer ids are cut.
inline constexpr size_t kClientIdBytesMax = 64;

/// Reads the info of a call that has just arrived. gRPC's deadline is a time of the wall clock; the
/// result has the time of `clock` that is equally far away now.
CallInfo CallInfoOf(const grpc::CallbackServerContext& context, const Clock& clock);

namespace internal {

/// Converts `deadline` from the wall clock to `clock`, by the time that is left now. The wall clock
/// is read once, so that a later step of it moves no deadline.
absl::Time DeadlineOn(const Clock& clock, absl::Time deadline,
                      absl::FunctionRef<absl::Time()> wall_now);

/// Returns the name that identifies a client for fairness: `claimed` (the metadata `client_id`)
/// with every character except letters, digits and "._:@/-" replaced by '_', or, if `claimed` is
/// empty, `peer` without its port.
std::string ClientId(absl::string_view claimed, absl::string_view peer);

}  // namespace internal

/// Counts requests between their arrival and the last byte of their answer. Thread-safe.
class WorkCount {
 public:
  void Begin() {
    absl::MutexLock lock(&mutex_);
    ++count_;
  }
  void End() {
    absl::MutexLock lock(&mutex_);
    --count_;
  }
  int64_t count() const {
    absl::MutexLock lock(&mutex_);
    return count_;
  }

  /// Waits until the count is 0 or `clock` reaches `until`; returns whether the count is 0.
  bool AwaitNone(const Clock& clock, absl::Time until) {
    absl::MutexLock lock(&mutex_);
    return clock.AwaitUntil(mutex_,
                            absl::Condition(
                                +[](int64_t* count) { return *count == 0; }, &count_),
                            until);
  }

 private:
  mutable absl::Mutex mutex_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logprobd
