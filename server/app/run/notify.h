#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace logprobd {

/// Sends `message` to the service manager that has started this process, if there is one: as one
/// datagram to the Unix socket that $NOTIFY_SOCKET names. `message` consists of lines such as
/// "READY=1\nSTATUS=ready"; sd_notify(3) describes them. Never waits. Returns UNAVAILABLE if the
/// manager cannot be reached or does not read, so that its queue is full, and INVALID_ARGUMENT if
/// the variable names no socket. Thread-safe.
absl::Status NotifyServiceManager(absl::string_view message);

/// Returns the time within which the service manager expects WATCHDOG=1 from this process
/// ($WATCHDOG_USEC and $WATCHDOG_PID, as in sd_watchdog_enabled(3)), or infinity if it expects
/// none.
absl::Duration ServiceWatchdogTime();

}  // namespace logprobd
