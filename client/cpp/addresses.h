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

/// The servers named by a comma-separated list of "host", "host:port", "[ipv6]:port",
/// "unix:///path" and "dns:///name:port"; the port is 8470 where none is given. An address that
/// comes twice counts once. INVALID_ARGUMENT names the bad one.
absl::StatusOr<std::vector<std::string>> ParseAddresses(absl::string_view text);

struct DnsName {
  std::string host;
  std::string port;
};

/// Host and port of "dns:///name:port", which ParseAddresses has passed; nothing for any other
/// address.
std::optional<DnsName> ParseDnsName(absl::string_view address);

/// "ip:port" of all records of a name, or UNAVAILABLE. May block.
using Resolver = std::function<absl::StatusOr<std::vector<std::string>>(const DnsName& name)>;

/// Asks the system for A and AAAA records; IPv6 in brackets, in a fixed order.
absl::StatusOr<std::vector<std::string>> ResolveName(const DnsName& name);

/// The addresses of a client with the records of its DNS names, and when to look them up. Looks
/// nothing up itself. Not thread-safe.
class AddressBook {
 public:
  static constexpr absl::Duration kPeriod = absl::Seconds(30);
  /// After a failure of a server or of a look-up: sooner, but not more often than this.
  static constexpr absl::Duration kPause = absl::Seconds(1);

  explicit AddressBook(std::vector<std::string> addresses);

  /// There is one server for good, and no name to look up.
  bool is_plain() const { return addresses_.size() == 1 && names_.empty(); }

  /// The DNS names to look up, by address.
  const std::map<std::string, DnsName>& names() const { return names_; }

  /// Whether to look up now; `failed_at` is when a server failed last.
  bool TakeDue(absl::Time now, absl::Time failed_at);

  /// Takes the result of a look-up. A name that failed keeps its last records.
  void Update(const std::string& address, absl::StatusOr<std::vector<std::string>> records);

  /// The servers known now.
  std::vector<std::string> servers() const;
  /// What look-ups failed with last, by address.
  const std::map<std::string, std::string>& errors() const { return errors_; }

 private:
  const std::vector<std::string> addresses_;
  std::map<std::string, DnsName> names_;
  std::map<std::string, std::vector<std::string>> records_;
  std::map<std::string, std::string> errors_;
  absl::Time asked_at_ = absl::InfinitePast();
};

}  // namespace logprobd::client
