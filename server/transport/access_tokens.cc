#include "server/transport/access_tokens.h"

#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/base/clock.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

/// Longer values are refused before they are hashed.
constexpr size_t kTokenBytesMax = 512;
constexpr int64_t kRefusalLinesMax = 20;
constexpr absl::Duration kRefusalLinesWindow = absl::Seconds(10);

/// Compares in a time that does not depend on the bytes.
bool AreEqual(const Sha256::Bytes& a, const Sha256::Bytes& b) {
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
  }
  return difference == 0;
}

}  // namespace

absl::string_view ScopeName(Scope scope) {
  switch (scope) {
    case Scope::kScore:
      return "score";
    case Scope::kVerify:
      return "verify";
    case Scope::kAdmin:
      return "admin";
    case Scope::kMetrics:
      return "metrics";
    case Scope::kAny:
      break;
  }
  return "any";
}

TokenRefusals::TokenRefusals(Metrics& metrics)
    : metrics_(metrics), lines_(kRefusalLinesMax, kRefusalLinesWindow, Clock::Steady()) {}

void TokenRefusals::Record(absl::string_view what, const absl::Status& reason) {
  metrics_.RecordRejection(absl::IsPermissionDenied(reason) ? Rejection::kPermissionDenied
                                                            : Rejection::kUnauthenticated);
  if (const std::optional<int64_t> suppressed = lines_.Admit(); suppressed.has_value()) {
    LogWarning("a call was refused",
               {{"method", what}, {"reason", reason.message()}, {"lines_suppressed", *suppressed}});
  }
}

void AccessTokens::Set(std::vector<AccessToken> tokens) {
  auto list = std::make_shared<List>();
  for (AccessToken& token : tokens) {
    list->push_back(std::make_shared<const AccessToken>(std::move(token)));
  }
  const absl::MutexLock lock(&mutex_);
  tokens_ = std::move(list);
}

absl::StatusOr<std::shared_ptr<const AccessToken>> AccessTokens::Check(
    absl::string_view authorization, Scope scope, absl::Time now) const {
  if (authorization.empty()) {
    return absl::UnauthenticatedError(
        "authorization: missing; this server needs a token (\"authorization: Bearer TOKEN\" in "
        "the metadata of a call or the headers of HTTP)");
  }
  constexpr absl::string_view kScheme = "bearer ";
  if (!absl::StartsWithIgnoreCase(authorization, kScheme) ||
      authorization.size() > kScheme.size() + kTokenBytesMax) {
    return absl::UnauthenticatedError("authorization: must be \"Bearer TOKEN\"");
  }
  const absl::string_view text = authorization.substr(kScheme.size());
  Sha256 sha256;
  sha256.Add({reinterpret_cast<const std::byte*>(text.data()), text.size()});
  LOGPROBD_ASSIGN_OR_RETURN(const Sha256::Bytes digest, sha256.Digest());
  std::shared_ptr<const List> tokens;
  {
    const absl::ReaderMutexLock lock(&mutex_);
    tokens = tokens_;
  }
  std::shared_ptr<const AccessToken> found;
  for (const std::shared_ptr<const AccessToken>& token : *tokens) {
    if (AreEqual(token->sha256, digest)) {
      found = token;
    }
  }
  if (found == nullptr) {
    return absl::UnauthenticatedError("authorization: the server does not know this token");
  }
  if (now >= found->not_after) {
    return absl::UnauthenticatedError(
        absl::StrCat("authorization: token \"", found->id, "\" expired at ",
                     absl::FormatTime(found->not_after, absl::UTCTimeZone())));
  }
  if (scope != Scope::kAny && !found->scopes[static_cast<size_t>(scope)]) {
    return absl::PermissionDeniedError(absl::StrCat("authorization: token \"", found->id,
                                                    "\" lacks the scope ", ScopeName(scope)));
  }
  return found;
}

std::shared_ptr<const AccessToken> AccessTokens::Find(absl::string_view id) const {
  const absl::ReaderMutexLock lock(&mutex_);
  for (const std::shared_ptr<const AccessToken>& token : *tokens_) {
    if (token->id == id) {
      return token;
    }
  }
  return nullptr;
}

}  // namespace logprobd
