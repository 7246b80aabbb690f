#pragma once

#include "absl/strings/string_view.h"

namespace logprobd {

/// Sends `message` to the service manager that has started this process, if there is one: as one
/// datagram to the Unix socket that $NOTIFY_SOCKET names. `message` consists of lines such as
/// "READY=1\nSTATUS=ready"; sd_notify(3) describes them. Waits while the manager's queue is full.
/// An error is logged. Thread-safe.
void NotifyServiceManager(absl::string_view message);

}  // namespace logprobd
