#include "server/app/run/http_access.h"

#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

/// Returns `authorization` with HTTP Basic replaced by the form that AccessList takes.
std::string BearerOf(absl::string_view authorization) {
  constexpr absl::string_view kBasic = "basic ";
  std::string pair;
  if (!absl::StartsWithIgnoreCase(authorization, kBasic) ||
      !absl::Base64Unescape(authorization.substr(kBasic.size()), &pair)) {
    return std::string(authorization);
  }
  const size_t colon = pair.find(':');  // a user's name has none
  return colon == std::string::npos ? std::string(authorization)
                                    : absl::StrCat("Bearer ", pair.substr(colon + 1));
}

}  // namespace

HttpAccess::HttpAccess(std::shared_ptr<const AccessList> access, Metrics& metrics)
    : access_(std::move(access)), refusals_(metrics) {}

absl::Status HttpAccess::Check(absl::string_view path, absl::string_view authorization,
                               absl::string_view peer) {
  const std::string bearer = BearerOf(authorization);
  Credentials caller;
  if (!bearer.empty()) caller.authorization = bearer;
  absl::Status status = access_->Check(caller, Scope::kMetrics).status();
  if (!status.ok()) {
    refusals_.Record(
        path, [&] { return CallerOf(caller, access_.get(), std::string(peer)); }, status);
  }
  return status;
}

}  // namespace logprobd
