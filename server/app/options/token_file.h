#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/transport/access_tokens.h"

namespace logprobd {

/// Reads a TOML file of tokens:
///
///   [[token]]
///   id = "trainer-7"                      # its name in logs
///   sha256 = "..."                        # hex digest of the token
///   tenant = "team-a"                     # by default the id
///   scopes = ["score", "metrics"]         # at least one of score, verify, admin and metrics
///   not_after = 2027-01-31T00:00:00Z      # optional
///   share = 0.25                          # optional share of the queue, by default --client-share
///   priority_max = "normal"               # optional: "high" (default), "normal" or "low"
///
/// Returns NOT_FOUND or PERMISSION_DENIED if it cannot be read, and INVALID_ARGUMENT that names the
/// token and the key if something is missing, unknown, repeated or out of range.
absl::StatusOr<std::vector<AccessToken>> ReadTokenFile(const std::string& path);

}  // namespace logprobd
