#pragma once

#include <cstdint>

#include "absl/time/time.h"

/// The constants of the policy by which clients retry and choose servers, which client/README.md
/// describes. They stand in proto/contract.json, and the Python client has the same.
namespace logprobd::client::policy {

// clang-format off
// [generated: cpp_policy]
/// Most attempts of a request while no server is available.
inline constexpr int32_t kAttemptsMax = 8;
/// Most attempts of a request while servers are overloaded.
inline constexpr int32_t kOverloadedAttemptsMax = 1000;
/// Upper bound of the first random wait; it doubles with each attempt.
inline constexpr absl::Duration kBackoffFirst = absl::Milliseconds(100);
/// Upper bound of every random wait.
inline constexpr absl::Duration kBackoffMax = absl::Milliseconds(5000);
// [end]
// clang-format on

}  // namespace logprobd::client::policy
