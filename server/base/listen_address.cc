#include "server/base/listen_address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace logprobd {
namespace {

constexpr absl::string_view kHttps = "https://";

bool IsLoopback(absl::string_view host) {
  return host == "localhost" || host == "::1" ||
         (absl::StartsWith(host, "127.") &&
          host.find_first_not_of("0123456789.") == absl::string_view::npos);
}

int PortOf(int listener) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

void SetPort(sockaddr* address, int port) {
  auto& field = address->sa_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(address)->sin6_port
                                               : reinterpret_cast<sockaddr_in*>(address)->sin_port;
  field = htons(static_cast<uint16_t>(port));
}

void SetOn(int socket, int level, int option) {
  const int on = 1;
  setsockopt(socket, level, option, &on, sizeof(on));
}

}  // namespace

std::string ListenAddress::ToString() const {
  if (!unix_path.empty()) return absl::StrCat("unix:", unix_path);
  const bool is_ipv6 = absl::StrContains(host, ':');
  return absl::StrCat(is_https ? kHttps : "", is_ipv6 ? "[" : "", host, is_ipv6 ? "]:" : ":", port);
}

absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view flag, absl::string_view text) {
  const auto invalid = [flag, text] {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, ": \"", text,
                     "\" must be host:port with a port in [0, 65535], such as 127.0.0.1:8470"));
  };
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) return invalid();
  absl::string_view host = text.substr(0, colon);
  const bool has_brackets = absl::StartsWith(host, "[") && absl::EndsWith(host, "]");
  if (has_brackets) host = host.substr(1, host.size() - 2);
  const absl::string_view port_text = text.substr(colon + 1);
  ListenAddress address;
  if (host.empty() || (!has_brackets && absl::StrContains(host, ':')) || port_text.empty() ||
      port_text.find_first_not_of("0123456789") != absl::string_view::npos ||
      !absl::SimpleAtoi(port_text, &address.port) || address.port > 65'535) {
    return invalid();
  }
  address.host = std::string(host);
  address.is_loopback = IsLoopback(host);
  return address;
}

absl::StatusOr<ListenAddress> ParseListenAddressOrPath(absl::string_view flag,
                                                       absl::string_view text) {
  if (!absl::ConsumePrefix(&text, "unix:")) return ParseListenAddress(flag, text);
  if (!absl::StartsWith(text, "/")) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, ": \"unix:", text, "\" must name an absolute path"));
  }
  ListenAddress address;
  address.unix_path = std::string(text);
  return address;
}

absl::StatusOr<ListenAddress> ParseHttpAddress(absl::string_view flag, absl::string_view text) {
  const bool is_https = absl::ConsumePrefix(&text, kHttps);
  absl::StatusOr<ListenAddress> address = ParseListenAddress(flag, text);
  if (address.ok()) address->is_https = is_https;
  return address;
}

absl::Status CheckReachable(absl::string_view flag, const ListenAddress& address,
                            const ListenerSecurity& has, bool insecure) {
  if (!address.unix_path.empty() || (address.is_loopback && !has.changes_weights)) {
    return absl::OkStatus();
  }
  const std::string https = has.is_http && !address.is_https
                                ? absl::StrCat("write ", kHttps, address.ToString(), " and ")
                                : "";
  if (has.has_tokens && !has.has_tls && !address.is_loopback) {
    return absl::FailedPreconditionError(
        absl::StrCat(flag, ": ", address.ToString(),
                     " is not a loopback address, and tokens would cross the network unencrypted; ",
                     https, "give --tls-cert and --tls-key"));
  }
  if (insecure || (has.has_tls && (has.has_client_certificates || has.has_tokens))) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat(flag, ": ", address.ToString(), " can be reached ",
                   address.is_loopback ? "by every user of this host" : "from other hosts",
                   " without authentication over TLS; ", https,
                   has.is_http ? "give --tls-cert, --tls-key and --tokens, "
                               : "give --tls-cert and --tls-key, and --tls-client-ca or --tokens, ",
                   "pass --insecure to allow that, or use ",
                   has.changes_weights ? "a Unix socket of this user (auto)"
                                       : "a loopback address such as 127.0.0.1"));
}

absl::StatusOr<ListeningSockets> ListenOn(absl::string_view flag, const ListenAddress& address) {
  const auto cannot_listen = [flag, &address](absl::string_view reason) {
    return absl::UnavailableError(
        absl::StrCat(flag, ": cannot listen on ", address.ToString(), ": ", reason));
  };
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(address.host.c_str(), nullptr, &hints, &found); error != 0) {
    return cannot_listen(gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
  ListeningSockets listening{.sockets = {}, .port = address.port};
  std::string reason = "the host name has no address";
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    FileDescriptor listener(
        socket(info->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
    if (!listener.is_open()) {
      reason = std::strerror(errno);  // for example, because the host has no IPv6
      continue;
    }
    SetOn(listener.get(), SOL_SOCKET, SO_REUSEADDR);
    if (info->ai_family == AF_INET6) SetOn(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY);
    SetPort(info->ai_addr, listening.port);
    if (bind(listener.get(), info->ai_addr, info->ai_addrlen) != 0 ||
        listen(listener.get(), SOMAXCONN) != 0) {
      if (errno == EADDRINUSE) {
        return cannot_listen("the port is in use; stop the other server or choose another port");
      }
      reason = std::strerror(errno);
      continue;
    }
    listening.port = PortOf(listener.get());  // the other addresses use the same port
    listening.sockets.push_back(std::move(listener));
  }
  if (listening.sockets.empty()) return cannot_listen(reason);
  return listening;
}

}  // namespace logprobd
