#include "server/app/options/token_file.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/civil_time.h"
#include "absl/time/time.h"
#include "server/app/options/toml_file.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

constexpr Scope kScopes[kNumScopes] = {Scope::kScore, Scope::kVerify, Scope::kAdmin,
                                       Scope::kMetrics};
constexpr size_t kNameBytesMax = 64;

absl::Status Bad(absl::string_view key, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat(key, ": ", problem));
}

/// Returns whether `name` can stand in a log line and in a metric without quotes.
bool IsName(absl::string_view name) {
  return !name.empty() && name.size() <= kNameBytesMax && absl::c_all_of(name, [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
           absl::string_view("._:@/-").find(c) != absl::string_view::npos;
  });
}

absl::StatusOr<std::string> TextOf(absl::string_view key, const toml::value& value) {
  if (!value.is_string()) {
    return Bad(key, "must be a string");
  }
  return value.as_string().str;
}

absl::Status SetName(absl::string_view key, const toml::value& value, std::string& name) {
  LOGPROBD_ASSIGN_OR_RETURN(name, TextOf(key, value));
  return IsName(name) ? absl::OkStatus()
                      : Bad(key, "must be 1 to 64 letters, digits and characters of ._:@/-");
}

absl::Status SetSha256(const toml::value& value, Sha256::Bytes& sha256) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::string hex, TextOf("sha256", value));
  if (hex.size() != 2 * sha256.size() || !absl::c_all_of(hex, absl::ascii_isxdigit)) {
    return Bad("sha256", "must be 64 hexadecimal digits");
  }
  std::memcpy(sha256.data(), absl::HexStringToBytes(hex).data(), sha256.size());
  return absl::OkStatus();
}

absl::Status SetScopes(const toml::value& value, AccessToken& token) {
  constexpr absl::string_view kProblem =
      "must be an array of \"score\", \"verify\", \"admin\" and \"metrics\" with at least one of "
      "them";
  if (!value.is_array() || value.as_array().empty()) {
    return Bad("scopes", kProblem);
  }
  for (const toml::value& item : value.as_array()) {
    const auto* const scope = absl::c_find_if(kScopes, [&](Scope known) {
      return item.is_string() && item.as_string().str == ScopeName(known);
    });
    if (scope == std::end(kScopes)) {
      return Bad("scopes", kProblem);
    }
    token.scopes[static_cast<size_t>(*scope)] = true;
  }
  return absl::OkStatus();
}

absl::Status SetNotAfter(const toml::value& value, absl::Time& not_after) {
  if (!value.is_offset_datetime()) {
    return Bad("not_after", "must be a time with its zone, such as 2027-01-31T00:00:00Z");
  }
  // The library's own conversion counts nanoseconds in 64 bits, which overflow in the year 2262.
  const toml::offset_datetime& at = value.as_offset_datetime();
  const absl::CivilSecond civil(at.date.year, at.date.month + 1, at.date.day, at.time.hour,
                                at.time.minute, at.time.second);
  const absl::Duration fraction = absl::Milliseconds(at.time.millisecond) +
                                  absl::Microseconds(at.time.microsecond) +
                                  absl::Nanoseconds(at.time.nanosecond);
  not_after = absl::FromCivil(civil, absl::UTCTimeZone()) + fraction - absl::Hours(at.offset.hour) -
              absl::Minutes(at.offset.minute);
  return absl::OkStatus();
}

absl::Status SetShare(const toml::value& value, double& share) {
  share = value.is_floating()  ? value.as_floating()
          : value.is_integer() ? static_cast<double>(value.as_integer())
                               : 0;
  return share > 0 && share <= 1 ? absl::OkStatus() : Bad("share", "must be a number in (0, 1]");
}

absl::Status SetPriorityMax(const toml::value& value, Priority& priority_max) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::string name, TextOf("priority_max", value));
  constexpr absl::string_view kNames[] = {"high", "normal", "low"};  // as enum Priority
  const auto* const found = absl::c_find(kNames, name);
  if (found == std::end(kNames)) {
    return Bad("priority_max", "must be \"high\", \"normal\" or \"low\"");
  }
  priority_max = static_cast<Priority>(found - std::begin(kNames));
  return absl::OkStatus();
}

absl::Status SetKey(const std::string& key, const toml::value& value, AccessToken& token) {
  if (key == "id") {
    return SetName(key, value, token.id);
  }
  if (key == "sha256") {
    return SetSha256(value, token.sha256);
  }
  if (key == "tenant") {
    return SetName(key, value, token.tenant);
  }
  if (key == "scopes") {
    return SetScopes(value, token);
  }
  if (key == "not_after") {
    return SetNotAfter(value, token.not_after);
  }
  if (key == "share") {
    return SetShare(value, token.share);
  }
  if (key == "priority_max") {
    return SetPriorityMax(value, token.priority_max);
  }
  return Bad(OneLine(key),
             "is unknown; the keys are id, sha256, tenant, scopes, not_after, share and "
             "priority_max");
}

absl::StatusOr<AccessToken> TokenOf(const toml::value& entry) {
  if (!entry.is_table()) {
    return absl::InvalidArgumentError("must be a table");
  }
  AccessToken token;
  for (const auto& [key, value] : entry.as_table()) {
    LOGPROBD_RETURN_IF_ERROR(SetKey(key, value, token));
  }
  for (const char* const key : {"id", "sha256", "scopes"}) {
    if (!entry.contains(key)) {
      return Bad(key, "is missing");
    }
  }
  if (token.tenant.empty()) {
    token.tenant = token.id;
  }
  return token;
}

}  // namespace

absl::StatusOr<std::vector<AccessToken>> ReadTokenFile(const std::string& path) {
  LOGPROBD_ASSIGN_OR_RETURN(const toml::value file, ParseTomlFile("file of tokens", path));
  const std::string prefix = absl::StrCat("file of tokens ", path);
  std::vector<AccessToken> tokens;
  for (const auto& [key, value] : file.as_table()) {
    if (key != "token" || !value.is_array()) {
      return absl::InvalidArgumentError(
          absl::StrCat(prefix, ": ", OneLine(key), " is unknown; each token is a [[token]]"));
    }
    for (const toml::value& entry : value.as_array()) {
      absl::StatusOr<AccessToken> token = TokenOf(entry);
      if (!token.ok()) {
        return WithContext(token.status(), absl::StrCat(prefix, ": token ", tokens.size() + 1));
      }
      for (const AccessToken& other : tokens) {
        if (other.id == token->id || other.sha256 == token->sha256) {
          return absl::InvalidArgumentError(
              absl::StrCat(prefix, ": token ", tokens.size() + 1, " has the ",
                           other.id == token->id ? "id" : "sha256", " of another, ", other.id));
        }
      }
      tokens.push_back(*std::move(token));
    }
  }
  if (tokens.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(prefix, " has no token, so that nobody could call the server"));
  }
  return tokens;
}

}  // namespace logprobd
