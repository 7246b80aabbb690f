#pragma once

#include <cstdint>
#include <string>
#include <thread>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// Memory of the host that this process may use, in bytes. A value is 0 if the system does not
/// report it.
struct HostMemorySize {
  int64_t total_bytes = 0;  ///< The machine's memory or the control group's limit, if it is lower.
  int64_t available_bytes = 0;  ///< The part that is free or can be freed without swapping.
};

/// Reads /proc/meminfo and the limit of the control group (version 2). `root` is a prefix of both
/// paths, for tests.
HostMemorySize ReadHostMemorySize(const std::string& root = "");

/// Starts a thread that the system's tools show as `name`, truncated to 15 bytes. An exception that
/// `body` does not catch is logged with `name` and aborts the process. Returns RESOURCE_EXHAUSTED
/// if the system cannot start a thread; `body` is then destroyed without being called.
absl::StatusOr<std::thread> StartThread(absl::string_view name, absl::AnyInvocable<void()> body);

}  // namespace logprobd
