#include "client/cpp/addresses.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cpp/policy.h"

namespace logprobd::client {
namespace {

constexpr char kDefaultPort[] = "8470";
constexpr char kDns[] = "dns:///";

absl::Status Refuse(absl::string_view address, absl::string_view advice) {
  return absl::InvalidArgumentError(absl::StrCat("address is \"", address, "\": ", advice));
}

/// Returns "host:port" for "host" or "host:port". Error messages quote `address`, the text that the
/// caller passed.
absl::StatusOr<std::string> WithPort(absl::string_view host, absl::string_view address) {
  if (host.empty() || absl::StrContains(host, '/')) {
    return Refuse(address, "use host:port, unix:///path for a socket, or dns:///name:port");
  }
  if (host.front() == '[') {
    return absl::StrContains(host, "]:") ? std::string(host)
                                         : absl::StrCat(host, ":", kDefaultPort);
  }
  const auto colons = std::count(host.begin(), host.end(), ':');
  if (colons > 1) return Refuse(address, "put an IPv6 address in brackets, as [::1]:8470");
  if (colons == 0) return absl::StrCat(host, ":", kDefaultPort);
  const absl::string_view port = host.substr(host.find(':') + 1);
  if (port.empty() || !std::all_of(port.begin(), port.end(), absl::ascii_isdigit)) {
    return Refuse(address, "the port is not a number: use host:port");
  }
  return std::string(host);
}

absl::StatusOr<std::string> Normalise(absl::string_view address) {
  address = absl::StripAsciiWhitespace(address);
  if (address.empty()) {
    return absl::InvalidArgumentError("address is empty: it must be host:port or unix:///path");
  }
  if (absl::string_view name = address; absl::ConsumePrefix(&name, kDns)) {
    absl::StatusOr<std::string> with_port = WithPort(name, address);
    if (!with_port.ok()) return with_port.status();
    return absl::StrCat(kDns, *with_port);
  }
  for (const absl::string_view scheme : {"unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:"}) {
    if (absl::StartsWith(address, scheme)) return std::string(address);
  }
  return WithPort(address, address);
}

/// Returns the numeric host of a record, in brackets for IPv6. Returns an empty string for any
/// other address family.
std::string NumericHost(const sockaddr& address) {
  std::array<char, INET6_ADDRSTRLEN> text = {};
  if (address.sa_family == AF_INET) {
    sockaddr_in v4 = {};
    std::memcpy(&v4, &address, sizeof(v4));
    inet_ntop(AF_INET, &v4.sin_addr, text.data(), text.size());
    return text.data();
  }
  if (address.sa_family == AF_INET6) {
    sockaddr_in6 v6 = {};
    std::memcpy(&v6, &address, sizeof(v6));
    inet_ntop(AF_INET6, &v6.sin6_addr, text.data(), text.size());
    return absl::StrCat("[", text.data(), "]");
  }
  return "";
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ParseAddresses(absl::string_view text) {
  std::vector<std::string> addresses;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    absl::StatusOr<std::string> address = Normalise(part);
    if (!address.ok()) return address.status();
    if (std::find(addresses.begin(), addresses.end(), *address) == addresses.end()) {
      addresses.push_back(*std::move(address));
    }
  }
  return addresses;
}

std::optional<DnsName> ParseDnsName(absl::string_view address) {
  if (!absl::ConsumePrefix(&address, kDns)) return std::nullopt;
  const size_t colon = address.rfind(':');
  absl::string_view host = address.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  return DnsName{.host = std::string(host), .port = std::string(address.substr(colon + 1))};
}

absl::StatusOr<std::vector<std::string>> ResolveName(const DnsName& name) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (const int error = getaddrinfo(name.host.c_str(), name.port.c_str(), &hints, &list);
      error != 0) {
    return absl::UnavailableError(gai_strerror(error));
  }
  std::set<std::string> addresses;
  for (const addrinfo* record = list; record != nullptr; record = record->ai_next) {
    const std::string host = NumericHost(*record->ai_addr);
    if (!host.empty()) addresses.insert(absl::StrCat(host, ":", name.port));
  }
  freeaddrinfo(list);
  return std::vector<std::string>(addresses.begin(), addresses.end());
}

AddressBook::AddressBook(std::vector<std::string> addresses) : addresses_(std::move(addresses)) {
  for (const std::string& address : addresses_) {
    if (std::optional<DnsName> name = ParseDnsName(address); name.has_value()) {
      names_[address] = *std::move(name);
    }
  }
}

bool AddressBook::TakeDue(absl::Time now, absl::Time failed_at) {
  if (names_.empty()) return false;
  const bool has_failed = failed_at > asked_at_ || records_.empty();
  if (now - asked_at_ < (has_failed ? policy::kResolvePause : policy::kResolve)) return false;
  asked_at_ = now;
  return true;
}

void AddressBook::Update(const std::string& address,
                         absl::StatusOr<std::vector<std::string>> records) {
  if (records.ok()) {
    records_[address] = *std::move(records);
    errors_.erase(address);
  } else {
    errors_[address] = std::string(records.status().message());
  }
}

std::vector<std::string> AddressBook::servers() const {
  std::vector<std::string> servers;
  const auto add = [&servers](const std::string& address) {
    if (std::find(servers.begin(), servers.end(), address) == servers.end()) {
      servers.push_back(address);
    }
  };
  for (const std::string& address : addresses_) {
    if (names_.count(address) == 0) {
      add(address);
    } else if (const auto found = records_.find(address); found != records_.end()) {
      for (const std::string& record : found->second) add(record);
    }
  }
  return servers;
}

}  // namespace logprobd::client
