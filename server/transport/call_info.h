#pragma once

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
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
}  // namespace logprobd
