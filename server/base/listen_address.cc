#include "server/base/listen_address.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

bool IsLoopback(absl::string_view host) {
  return host == "localhost" || host == "::1" ||
         (absl::StartsWith(host, "127.") &&
          host.find_first_not_of("0123456789.") == absl::string_view::npos);
}

}  // namespace

std::string ListenAddress::ToString() const {
  return absl::StrContains(host, ':') ? absl::StrCat("[", host, "]:", port)
                                      : absl::StrCat(host, ":", port);
}

absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view flag, absl::string_view text) {
  const auto invalid = [flag, text] {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, ": \"", text,
                     "\" must be host:port with a port in [0, 65535], such as 127.0.0.1:8470"));
  };
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) {
    return invalid();
  }
  absl::string_view host = text.substr(0, colon);
  const bool has_brackets = absl::StartsWith(host, "[") && absl::EndsWith(host, "]");
  if (has_brackets) {
    host = host.substr(1, host.size() - 2);
  }
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

absl::Status CheckLoopback(absl::string_view flag, const ListenAddress& address, bool insecure,
                           ClientCertificates certificates) {
  if (address.is_loopback || insecure || certificates == ClientCertificates::kRequired) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      flag, ": ", address.ToString(), " can be reached from other hosts without authentication; ",
      certificates == ClientCertificates::kOff
          ? "give --tls-cert, --tls-key and --tls-client-ca to demand certificates "
            "of clients, "
          : "",
      "pass --insecure to allow that, or use a loopback address such as 127.0.0.1"));
}

}  // namespace logprobd
