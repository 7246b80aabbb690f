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

/// What a call says beside its messages.
struct CallInfo {
  std::string client_id;
  absl::Time deadline = absl::InfiniteFuture();  ///< On the server's Clock.
};

/// Longest client id; longer ones are cut.
inline constexpr size_t kClientIdBytesMax = 64;

/// Read once, when the call arrives: gRPC's deadline is on the wall clock and is carried over to
/// `clock` by the time left now.
CallInfo FactsOf(const grpc::CallbackServerContext& context, const Clock& clock);

namespace internal {

/// `deadline`, on the wall clock, as a time of `clock`: what is left of it now. The wall clock is
/// read once, so that a step of it later moves no deadline.
absl::Time DeadlineOn(const Clock& clock, absl::Time deadline,
                      absl::FunctionRef<absl::Time()> wall_now);

/// The name under which a client shares: `claimed` (metadata `client_id`) with anything but
/// letters, digits and "._:@/-" replaced by '_', else `peer` without its port.
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

  /// Whether nothing was left at `until`, on `clock`.
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
