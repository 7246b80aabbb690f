#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/app/options/server_options.h"
#include "server/transport/access_list.h"

namespace logprobd {

/// Reads a TOML file of tokens and of certificates, with at least one entry of either:
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
///   [[certificate]]
///   name = "trainer-8.example"            # its name (CredentialsOf), at most 255 bytes
///   ...                                   # tenant (by default the name) and the keys after it;
///                                         # scopes without metrics, since HTTP takes tokens only
///
/// The result has the entries in the order of the file, first the tokens. Returns NOT_FOUND or
/// PERMISSION_DENIED if the file cannot be read, and INVALID_ARGUMENT that names the entry and the
/// key if something is missing, unknown, repeated or out of range.
absl::StatusOr<std::vector<AccessEntry>> ReadTokenFile(const std::string& path);

/// Returns the entries of the file of --tokens, or an error of ReadTokenFile, or INVALID_ARGUMENT
/// if certificates have entries without --tls-client-ca, where clients show no certificates.
absl::StatusOr<std::vector<AccessEntry>> AccessEntriesOf(const ServerOptions& options);

}  // namespace logprobd
