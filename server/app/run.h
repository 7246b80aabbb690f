#pragma once

#include <string>

#include "absl/types/span.h"

namespace logprobd {

/// Exit statuses of the program.
inline constexpr int kExitStopped = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitBadSettings = 2;
inline constexpr int kExitWorkCut = 3;

/// The whole program: reads the settings, does what they ask and returns the exit status. To be
/// called from main before any thread is started. `arguments` without the program's name;
/// `environment` as "NAME=value".
///
/// SIGHUP makes it read file and environment again (Server::RequestReload). SIGTERM and SIGINT stop
/// it: while it loads, at once; while it serves, within --grace-s. A second
/// one ends the process with kExitWorkCut, and so does work that outlives the grace time: it may be
/// stuck in a device, so nothing waits for it. A failure is one line on standard error.
int RunLogprobd(absl::Span<const std::string> arguments, absl::Span<const std::string> environment);

}  // namespace logprobd
