#include "server/http/http_address.h"

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace logprobd {

absl::StatusOr<HttpAddress> ParseHttpAddress(absl::string_view address) {
  const auto error = [address] {
    return absl::InvalidArgumentError(absl::StrCat(
        "address \"", address, "\": use host:port, as in 127.0.0.1:9470 or [::1]:9470"));
  };
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos) {
    return error();
  }
  absl::string_view host = address.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) {
    if (!absl::ConsumeSuffix(&host, "]")) {
      return error();
    }
  } else if (absl::StrContains(host, ':')) {
    return error();
  }
  const absl::string_view digits = address.substr(colon + 1);
  const bool is_number = digits.find_first_not_of("0123456789") == absl::string_view::npos;
  HttpAddress result{std::string(host), 0, false};
  result.is_loopback = host == "localhost" || host == "::1" ||
                       (absl::StartsWith(host, "127.") &&
                        host.find_first_not_of("0123456789.") == absl::string_view::npos);
  if (host.empty() || !is_number || !absl::SimpleAtoi(digits, &result.port) ||
      result.port > 65'535) {
    return error();
  }
  return result;
}

}  // namespace logprobd
