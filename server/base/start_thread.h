#pragma once

#include <thread>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// Starts a thread that is called `name` in the system's tools (at most 15 bytes of it). An
/// exception that leaves `body` ends the process like a failed check, with `name` and what it says
/// on the log. RESOURCE_EXHAUSTED when no thread can be had; `body` is then dropped.
absl::StatusOr<std::thread> StartThread(absl::string_view name, absl::AnyInvocable<void()> body);

}  // namespace logprobd
