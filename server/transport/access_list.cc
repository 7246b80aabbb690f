#include "server/transport/access_list.h"

#include <algorithm>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/transport/constant_time.h"

namespace logprobd {
namespace {

/// Longer values are refused before they are hashed.
constexpr size_t kTokenBytesMax = 512;
/// Longer names of certificates are cut in messages.
constexpr size_t kNameBytesMax = 255;

constexpr absl::string_view kNeedsToken =
    "authorization: missing; this server needs a token (\"authorization: Bearer TOKEN\" in the "
    "metadata of a call or the headers of HTTP)";

absl::StatusOr<Sha256::Bytes> DigestOf(absl::string_view authorization) {
  constexpr absl::string_view kScheme = "bearer ";
  if (!absl::StartsWithIgnoreCase(authorization, kScheme) ||
      authorization.size() > kScheme.size() + kTokenBytesMax) {
    return absl::UnauthenticatedError("authorization: must be \"Bearer TOKEN\"");
  }
  const absl::string_view text = authorization.substr(kScheme.size());
  Sha256 sha256;
  sha256.Add({reinterpret_cast<const std::byte*>(text.data()), text.size()});
  return sha256.Digest();
}

/// Returns how messages name an entry.
std::string NameOf(const AccessEntry& entry) {
  return absl::StrCat(entry.is_token() ? "authorization: token \"" : "the entry of certificate \"",
                      entry.id, "\"");
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

AccessRefusals::AccessRefusals(Metrics& metrics) : metrics_(metrics), lines_(Clock::Steady()) {}

void AccessRefusals::Record(absl::string_view what, absl::FunctionRef<Caller()> caller_of,
                            const absl::Status& reason) {
  metrics_.RecordRejection(absl::IsPermissionDenied(reason) ? Rejection::kPermissionDenied
                                                            : Rejection::kUnauthenticated);
  if (const std::optional<int64_t> suppressed = lines_.Admit(); suppressed.has_value()) {
    const Caller caller = caller_of();
    std::vector<LogField> fields = {
        {"method", what}, {"token", caller.token}, {"certificate", caller.certificate}};
    if (!caller.peer.empty()) fields.emplace_back("peer", caller.peer);
    fields.emplace_back("reason", reason.message());
    fields.emplace_back("lines_suppressed", *suppressed);
    LogAlways(LogLevel::kWarning, "a call was refused", fields);
  }
}

Caller CallerOf(const Credentials& credentials, const AccessList* access, std::string peer) {
  Caller caller{.peer = std::move(peer)};
  if (!credentials.certificate_names.empty()) {
    caller.certificate =
        std::string(credentials.certificate_names.front().substr(0, kNameBytesMax));
  }
  if (access != nullptr) {
    const absl::StatusOr<std::shared_ptr<const AccessEntry>> entry = access->Identify(credentials);
    if (entry.ok()) ((*entry)->is_token() ? caller.token : caller.certificate) = (*entry)->id;
  }
  return caller;
}

void AccessList::Set(std::vector<AccessEntry> entries) {
  auto lists = std::make_shared<Lists>();
  for (AccessEntry& entry : entries) {
    auto shared = std::make_shared<const AccessEntry>(std::move(entry));
    if (shared->is_token()) {
      lists->digests.push_back(*shared->sha256);
      lists->tokens.push_back(std::move(shared));
    } else {
      lists->certificates.push_back(std::move(shared));
    }
  }
  const absl::MutexLock lock(&mutex_);
  lists_ = std::move(lists);
}

absl::StatusOr<std::shared_ptr<const AccessEntry>> AccessList::Identify(
    const Credentials& caller) const {
  std::shared_ptr<const Lists> lists;
  {
    const absl::ReaderMutexLock lock(&mutex_);
    lists = lists_;
  }
  if (caller.authorization.has_value()) {
    LOGPROBD_ASSIGN_OR_RETURN(const Sha256::Bytes digest, DigestOf(*caller.authorization));
    const size_t found = FindInConstantTime(lists->digests, digest);
    if (found == lists->digests.size()) {
      return absl::UnauthenticatedError("authorization: the server does not know this token");
    }
    return lists->tokens[found];
  }
  const auto named = absl::c_find_if(lists->certificates, [&](const auto& entry) {
    return absl::c_linear_search(caller.certificate_names, entry->id);
  });
  if (named != lists->certificates.end()) return *named;
  if (caller.certificate_names.empty()) return absl::UnauthenticatedError(kNeedsToken);
  const std::string name =
      absl::CHexEscape(caller.certificate_names.front().substr(0, kNameBytesMax));
  return absl::UnauthenticatedError(
      absl::StrCat(kNeedsToken, ", or a [[certificate]] named \"", name,
                   "\" in its file of tokens (logprobctl token certificate)"));
}

absl::StatusOr<std::shared_ptr<const AccessEntry>> AccessList::Check(const Credentials& caller,
                                                                     Scope scope) const {
  LOGPROBD_ASSIGN_OR_RETURN(std::shared_ptr<const AccessEntry> entry, Identify(caller));
  if (wall_now_() >= entry->not_after) {
    return absl::UnauthenticatedError(absl::StrCat(
        NameOf(*entry), " expired at ", absl::FormatTime(entry->not_after, absl::UTCTimeZone())));
  }
  if (scope != Scope::kAny && !entry->scopes[static_cast<size_t>(scope)]) {
    return absl::PermissionDeniedError(
        absl::StrCat(NameOf(*entry), " lacks the scope ", ScopeName(scope)));
  }
  return entry;
}

}  // namespace logprobd
