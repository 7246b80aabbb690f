#pragma once

#include "absl/status/status.h"

namespace logprobd {

/// Fewest open files with which the server starts: its own are about 40, and each connection takes
/// one.
inline constexpr int kOpenFilesMin = 256;
/// Threads that must be creatable beside those that run: gRPC's, the engine's and the server's own.
inline constexpr int kThreadsMin = 64;

/// Raises the soft limit of open files as far as the hard one goes, then checks files and threads.
/// RESOURCE_EXHAUSTED names the limit, its value and the least that is needed.
absl::Status PrepareProcessLimits();

}  // namespace logprobd
