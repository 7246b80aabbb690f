#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace logprobd::client {

/// Parses a comma-separated list of "host", "host:port", "[ipv6]:port", "unix:///path" and
/// "dns:///name:port"; the default port is 8470. Duplicates are dropped. Returns INVALID_ARGUMENT
/// with the malformed address in the message.
absl::StatusOr<std::vector<std::string>> ParseAddresses(absl::string_view text);

struct DnsName {
  std::string host;
  std::string port;
};

/// Returns host and port of "dns:///name:port", or nullopt for any other address. ParseAddresses
/// must have accepted `address`.
std::optional<DnsName> ParseDnsName(absl::string_view address);

/// Returns "ip:port" for each record of a name, or UNAVAILABLE. It may block.
using Resolver = std::function<absl::StatusOr<std::vector<std::string>>(const DnsName& name)>;

/// Resolves A and AAAA records with the system's resolver. The result is sorted, with IPv6
/// addresses in brackets.
absl::StatusOr<std::vector<std::string>> ResolveName(const DnsName& name);

/// The addresses of a client, the records of its DNS names, and when to look them up. It does not
/// resolve names itself. Not thread-safe.
class AddressBook {
 public:
  explicit AddressBook(std::vector<std::string> addresses);

  /// Returns whether there is exactly one server and no name to resolve.
  bool is_plain() const { return addresses_.size() == 1 && names_.empty(); }

  /// Returns the DNS names to look up, by address.
  const std::map<std::string, DnsName>& names() const { return names_; }

  /// Returns whether to look names up now, and if so records the time. `failed_at` is when a server
  /// last failed.
  bool TakeDue(absl::Time now, absl::Time failed_at);

  /// Stores the result of a look-up. If the look-up failed, the name keeps its earlier records.
  void Update(const std::string& address, absl::StatusOr<std::vector<std::string>> records);

  /// Returns the currently known servers.
  std::vector<std::string> servers() const;
  /// Returns the error of the latest look-up, by address. Names without an error are absent.
  const std::map<std::string, std::string>& errors() const { return errors_; }

 private:
  const std::vector<std::string> addresses_;
  std::map<std::string, DnsName> names_;
  std::map<std::string, std::vector<std::string>> records_;
  std::map<std::string, std::string> errors_;
  absl::Time asked_at_ = absl::InfinitePast();
};

}  // namespace logprobd::client
