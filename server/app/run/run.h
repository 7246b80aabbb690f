#pragma once

#include <string>

#include "absl/types/span.h"

namespace logprobd {

/// Exit statuses of the program.
inline constexpr int kExitStopped = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitBadSettings = 2;
inline constexpr int kExitWorkCut = 3;
inline constexpr int kExitHung = 4;

/// Runs the whole program: reads the settings, does what they request and returns the exit status.
/// Must be called from main before any thread is started. `arguments` excludes the program's name;
/// `environment` has the form "NAME=value".
///
/// SIGHUP makes the server read the configuration file and the environment again
/// (Server::RequestReload). SIGTERM and SIGINT stop it: at once while it loads, and within
/// --grace-s while it serves. The process ends with kExitWorkCut if a second such signal arrives or
/// if work is not finished within the grace time; such work may be stuck in a device, so the
/// process does not wait for it. It ends with kExitHung if a thread stands still with work in hand
/// (watchdog.h). A failure is reported as one line on standard error. A start ends with
/// kExitBadSettings if only an edit can help (INVALID_ARGUMENT, OUT_OF_RANGE, UNIMPLEMENTED),
/// wherever that is found, and with kExitFailed if time or another program may.
int RunLogprobd(absl::Span<const std::string> arguments, absl::Span<const std::string> environment);

}  // namespace logprobd
