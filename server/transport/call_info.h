#pragma once

#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/server_context.h"
#include "server/base/clock.h"
#include "server/base/score_request.h"
#include "server/base/trace_context.h"
#include "server/transport/access_list.h"

namespace logprobd {

/// The data of a gRPC call that is not in its messages.
struct CallInfo {
  /// UNAUTHENTICATED if the caller's entry has been removed since the call was accepted.
  absl::Status access;
  std::string client_id;      ///< Whose call it is; see ScoreRequest::client_id.
  std::string sub_client_id;  ///< See ScoreRequest::sub_client_id.
  double client_share = 0;    ///< See ScoreRequest::client_share.
  Priority priority_max = Priority::kHigh;
  absl::Time deadline = absl::InfiniteFuture();  ///< In the time of the server's Clock.
  TraceContext trace_context;                    ///< Of the metadata `traceparent`.
};

/// Maximum size of a client id in bytes. Longer ids are truncated.
inline constexpr size_t kClientIdBytesMax = 64;

/// Returns the info of a call that has just arrived and that an AccessProcessor of `access`, unless
/// it is null, has accepted. gRPC's deadline is a time of the wall clock.
/// The result has the time of `clock` that lies equally far in the future.
CallInfo CallInfoOf(const grpc::CallbackServerContext& context, const AccessList* access,
                    const Clock& clock);

/// Returns the PeerNetworkOf the address of a peer as gRPC writes it, such as
/// "ipv4:127.0.0.1:50312" or "ipv6:%5B::1%5D:50312", or "unix" for Unix sockets.
std::string PeerNetworkOf(absl::string_view peer);

namespace internal {

/// Converts `deadline` from the wall clock to `clock`, based on the time that remains now. The wall
/// clock is read only once, so that a later step of the wall clock does not move the deadline.
absl::Time DeadlineOn(const Clock& clock, absl::Time deadline,
                      absl::FunctionRef<absl::Time()> wall_now);

/// Returns the name that a client gives itself: `claimed` (the metadata `client_id`)
/// with every character except letters, digits and "._:@/-" replaced by '_', or, if `claimed` is
/// empty, `peer` without its port.
std::string ClientId(absl::string_view claimed, absl::string_view peer);

}  // namespace internal

/// Counts requests from their arrival until the last byte of their response is sent. Thread-safe.
class WorkCount {
 public:
  void Begin() {
    const absl::MutexLock lock(&mutex_);
    ++count_;
  }
  void End() {
    const absl::MutexLock lock(&mutex_);
    --count_;
  }
  int64_t count() const {
    const absl::MutexLock lock(&mutex_);
    return count_;
  }

  /// Waits until the count is 0 or `clock` reaches `until`. Returns whether the count is 0.
  bool AwaitNone(const Clock& clock, absl::Time until) {
    const absl::MutexLock lock(&mutex_);
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
