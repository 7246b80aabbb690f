#pragma once

#include <cstdint>

#include "absl/time/time.h"

/// The constants of the policy by which clients retry and choose servers, which client/README.md
/// describes. They stand in proto/contract.json, and the Python client has the same.
namespace logprobd::client::policy {

// clang-format off
// [generated: cpp_policy]
/// Most attempts at a request while servers are unavailable.
inline constexpr int32_t kAttemptsMax = 8;
/// Most attempts at a request while servers refuse it because of load.
inline constexpr int32_t kOverloadedAttemptsMax = 1000;
/// Upper bound of the first random wait; it doubles with each attempt.
inline constexpr absl::Duration kWaitFirst = absl::Milliseconds(100);
/// Upper bound of every random wait.
inline constexpr absl::Duration kWaitMax = absl::Milliseconds(5000);
/// Time limit of a call with all its requests and retries.
inline constexpr absl::Duration kCallTimeout = absl::Milliseconds(300000);
/// Requests of a call that are in flight at each server.
inline constexpr int32_t kInflightMax = 8;
/// Time without an answer after which the caller is told that the call waits.
inline constexpr absl::Duration kNotice = absl::Milliseconds(1000);
/// First pause between two probes of a server that is not ready; it grows by half each time.
inline constexpr absl::Duration kReadyPauseFirst = absl::Milliseconds(20);
/// Longest pause between two such probes.
inline constexpr absl::Duration kReadyPauseMax = absl::Milliseconds(500);
/// Interval between checks of each of several servers, while calls are made.
inline constexpr absl::Duration kCheck = absl::Milliseconds(10000);
/// Time limit of each request of a check, and of a probe.
inline constexpr absl::Duration kCheckTimeout = absl::Milliseconds(5000);
/// Time for which the first call waits for the other servers once one is ready.
inline constexpr absl::Duration kFirstLook = absl::Milliseconds(1000);
/// Interval at which a call with waiting requests looks whether more servers are ready.
inline constexpr absl::Duration kLookAgain = absl::Milliseconds(250);
/// First bound of the time for which a failed server is left out; it doubles with each failure.
inline constexpr absl::Duration kBackoffFirst = absl::Milliseconds(500);
/// Longest bound of that time.
inline constexpr absl::Duration kBackoffMax = absl::Milliseconds(30000);
/// Time for which a server is avoided after a refusal because of load without a hint.
inline constexpr absl::Duration kBusy = absl::Milliseconds(100);
/// Time for which the version of the weights that a server reported counts as known.
inline constexpr absl::Duration kVersion = absl::Milliseconds(10000);
/// Interval between look-ups of a name.
inline constexpr absl::Duration kResolve = absl::Milliseconds(30000);
/// Shortest interval between look-ups, after a failure of a server or of a look-up.
inline constexpr absl::Duration kResolvePause = absl::Milliseconds(1000);
/// Restarts of a call on several servers whose weights change.
inline constexpr int32_t kRestartsMax = 3;
/// Rounds of a call; each scores again what another version scored before.
inline constexpr int32_t kSwapRoundsMax = 3;
/// First pause before a lost connection is opened again.
inline constexpr absl::Duration kReconnectFirst = absl::Milliseconds(100);
/// Longest pause before a lost connection is opened again.
inline constexpr absl::Duration kReconnectMax = absl::Milliseconds(2000);
/// Time after which an idle connection is probed.
inline constexpr absl::Duration kKeepalive = absl::Milliseconds(30000);
/// Time for the answer to this probe; without it the connection is closed.
inline constexpr absl::Duration kKeepaliveTimeout = absl::Milliseconds(10000);
// [end]
// clang-format on

}  // namespace logprobd::client::policy
