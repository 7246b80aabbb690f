#pragma once

#include <cstdint>
#include <string>
#include <thread>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// Memory of the host that this process can have, in bytes; 0 where the system does not say.
struct HostMemorySize {
  int64_t total_bytes = 0;      ///< Of the machine, or the limit of the control group.
  int64_t available_bytes = 0;  ///< Of it, what others leave without swapping.
};

/// From /proc/meminfo and, below that, the control group (version 2). `root`: where to find them.
HostMemorySize ReadHostMemorySize(const std::string& root = "");

/// Starts a thread that is called `name` in the system's tools (at most 15 bytes of it). An
/// exception that leaves `body` ends the process like a failed check, with `name` and what it says
/// on the log. RESOURCE_EXHAUSTED when no thread can be had; `body` is then dropped.
absl::StatusOr<std::thread> StartThread(absl::string_view name, absl::AnyInvocable<void()> body);

}  // namespace logprobd
