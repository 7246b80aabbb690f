#pragma once

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace logprobd {

/// Sends `message` to the service manager that has started this process, if there is one: as one
/// datagram to the Unix socket that $NOTIFY_SOCKET names. `message` consists of lines such as
/// "READY=1\nSTATUS=ready"; sd_notify(3) describes them. Waits while the manager's queue is full,
/// but at most a second. An error is logged. Thread-safe.
void NotifyServiceManager(absl::string_view message);

/// Returns the time within which the service manager expects WATCHDOG=1 from this process
/// ($WATCHDOG_USEC and $WATCHDOG_PID, as in sd_watchdog_enabled(3)), or infinity if it expects
/// none.
absl::Duration ServiceWatchdogTime();

}  // namespace logprobd
