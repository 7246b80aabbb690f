#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/app/server_options.h"

namespace logprobd {

/// What SIGHUP makes of settings that have been read again.
struct Reload {
  ServerOptions options;                   ///< Those in force from now on.
  std::vector<std::string> applied;        ///< Flags that `options` takes over, by name.
  std::vector<std::string> needs_restart;  ///< Flags that have changed beside them.
};

/// Compares `wanted` with `current`. `start`: the settings of the start, which fix the workspace: a
/// top_k_max above theirs needs a restart. Errors are those of CheckServerOptions of what would be
/// in force.
absl::StatusOr<Reload> PlanReload(const ServerOptions& start, const ServerOptions& current,
                                  const ServerOptions& wanted);

}  // namespace logprobd
