#pragma once

#include <cstdint>
#include <string>
#include <thread>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// Memory of the host that this process may use, in bytes. 0 when the system does not tell.
struct HostMemorySize {
  int64_t total_bytes = 0;  ///< The machine's memory, or the limit of the control group if lower.
  int64_t available_bytes = 0;  ///< The part that is free or can be freed without swapping.
};

/// Reads /proc/meminfo and the limit of the control group (version 2). `root` is a prefix of both
/// paths, for tests.
HostMemorySize ReadHostMemorySize(const std::string& root = "");

/// Starts a thread that the system's tools show as `name`, cut at 15 bytes. An exception that
/// leaves `body` is logged with `name` and aborts the process. RESOURCE_EXHAUSTED when the system
/// gives no thread; `body` is then destroyed without a call.
absl::StatusOr<std::thread> StartThread(absl::string_view name, absl::AnyInvocable<void()> body);

}  // namespace logprobd
