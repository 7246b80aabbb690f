#include "server/app/options/token_file.h"

#include <algorithm>
#include <cstring>
#include <functional>
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
/// A DNS name has at most 253 bytes.
constexpr size_t kCertificateNameBytesMax = 255;

absl::Status Bad(absl::string_view key, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat(key, ": ", problem));
}

/// Returns whether `name` can stand in a log line and in a metric without quotes.
bool IsName(absl::string_view name, size_t bytes_max) {
  return !name.empty() && name.size() <= bytes_max && absl::c_all_of(name, [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
           absl::string_view("._:@/-").find(c) != absl::string_view::npos;
  });
}

absl::StatusOr<std::string> TextOf(absl::string_view key, const toml::value& value) {
  if (!value.is_string()) return Bad(key, "must be a string");
  return value.as_string().str;
}

absl::Status SetName(absl::string_view key, const toml::value& value, std::string& name,
                     size_t bytes_max = kNameBytesMax) {
  LOGPROBD_ASSIGN_OR_RETURN(name, TextOf(key, value));
  return IsName(name, bytes_max)
             ? absl::OkStatus()
             : Bad(key, absl::StrCat("must be 1 to ", bytes_max,
                                     " letters, digits and characters of ._:@/-"));
}

absl::Status SetSha256(const toml::value& value, std::optional<Sha256::Bytes>& digest) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::string hex, TextOf("sha256", value));
  Sha256::Bytes& sha256 = digest.emplace();
  if (hex.size() != 2 * sha256.size() || !absl::c_all_of(hex, absl::ascii_isxdigit)) {
    return Bad("sha256", "must be 64 hexadecimal digits");
  }
  std::memcpy(sha256.data(), absl::HexStringToBytes(hex).data(), sha256.size());
  return absl::OkStatus();
}

absl::Status SetScopes(const toml::value& value, bool is_token, AccessEntry& entry) {
  constexpr absl::string_view kProblem =
      "must be an array of \"score\", \"verify\", \"admin\" and \"metrics\" with at least one of "
      "them";
  if (!value.is_array() || value.as_array().empty()) return Bad("scopes", kProblem);
  for (const toml::value& item : value.as_array()) {
    const auto* const scope = absl::c_find_if(kScopes, [&](Scope known) {
      return item.is_string() && item.as_string().str == ScopeName(known);
    });
    if (scope == std::end(kScopes)) return Bad("scopes", kProblem);
    if (*scope == Scope::kMetrics && !is_token) {
      return Bad("scopes",
                 "\"metrics\" is for tokens only, since HTTP asks for no certificates; give this "
                 "scope to a [[token]]");
    }
    entry.scopes[static_cast<size_t>(*scope)] = true;
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

/// The entries of one kind.
struct Kind {
  const char* name;    ///< Name of the array of tables.
  const char* id_key;  ///< Key of AccessEntry::id.
  size_t id_bytes_max;
  bool has_digest;
};

constexpr Kind kToken = {"token", "id", kNameBytesMax, true};
constexpr Kind kCertificate = {"certificate", "name", kCertificateNameBytesMax, false};

absl::Status SetKey(const Kind& kind, const std::string& key, const toml::value& value,
                    AccessEntry& entry) {
  if (key == kind.id_key) return SetName(key, value, entry.id, kind.id_bytes_max);
  if (key == "sha256" && kind.has_digest) return SetSha256(value, entry.sha256);
  if (key == "tenant") return SetName(key, value, entry.tenant);
  if (key == "scopes") return SetScopes(value, kind.has_digest, entry);
  if (key == "not_after") return SetNotAfter(value, entry.not_after);
  if (key == "share") return SetShare(value, entry.share);
  if (key == "priority_max") return SetPriorityMax(value, entry.priority_max);
  return Bad(OneLine(key), absl::StrCat("is unknown; the keys are ", kind.id_key,
                                        kind.has_digest ? ", sha256" : "",
                                        ", tenant, scopes, not_after, share and priority_max"));
}

absl::StatusOr<AccessEntry> EntryOf(const Kind& kind, const toml::value& table) {
  if (!table.is_table()) return absl::InvalidArgumentError("must be a table");
  AccessEntry entry;
  for (const auto& [key, value] : table.as_table()) {
    LOGPROBD_RETURN_IF_ERROR(SetKey(kind, key, value, entry));
  }
  for (const char* const key : {kind.id_key, "scopes", "sha256"}) {
    if (!table.contains(key) && (key != absl::string_view("sha256") || kind.has_digest)) {
      return Bad(key, "is missing");
    }
  }
  if (entry.tenant.empty()) entry.tenant = entry.id;
  return entry;
}

/// Appends the entries of one kind. Errors name the entry by its number.
absl::Status AppendEntries(const Kind& kind, const toml::array& tables,
                           std::vector<AccessEntry>& entries) {
  const size_t begin = entries.size();
  for (const toml::value& table : tables) {
    const std::string label = absl::StrCat(kind.name, " ", entries.size() - begin + 1);
    absl::StatusOr<AccessEntry> entry = EntryOf(kind, table);
    if (!entry.ok()) return WithContext(entry.status(), label);
    for (size_t i = begin; i < entries.size(); ++i) {
      const AccessEntry& other = entries[i];
      if (other.id == entry->id || (kind.has_digest && other.sha256 == entry->sha256)) {
        return absl::InvalidArgumentError(
            absl::StrCat(label, " has the ", other.id == entry->id ? kind.id_key : "sha256",
                         " of another, ", other.id));
      }
    }
    entries.push_back(*std::move(entry));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<AccessEntry>> ReadTokenFile(const std::string& path) {
  LOGPROBD_ASSIGN_OR_RETURN(const toml::value file, ParseTomlFile("file of tokens", path));
  const std::string prefix = absl::StrCat("file of tokens ", path);
  for (const auto& [key, value] : file.as_table()) {
    if ((key != kToken.name && key != kCertificate.name) || !value.is_array()) {
      return absl::InvalidArgumentError(
          absl::StrCat(prefix, ": ", OneLine(key),
                       " is unknown; each entry is a [[token]] or a [[certificate]]"));
    }
  }
  std::vector<AccessEntry> entries;
  for (const Kind& kind : {kToken, kCertificate}) {
    if (file.contains(kind.name)) {
      LOGPROBD_RETURN_IF_ERROR(
          WithContext(AppendEntries(kind, file.at(kind.name).as_array(), entries), prefix));
    }
  }
  if (entries.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        prefix, " has no token and no certificate, so that nobody could call the server"));
  }
  return entries;
}

absl::StatusOr<std::vector<AccessEntry>> AccessEntriesOf(const ServerOptions& options) {
  LOGPROBD_ASSIGN_OR_RETURN(std::vector<AccessEntry> entries, ReadTokenFile(options.tokens));
  if (options.tls_client_ca.empty() &&
      !absl::c_all_of(entries, std::mem_fn(&AccessEntry::is_token))) {
    return absl::InvalidArgumentError(
        absl::StrCat("file of tokens ", options.tokens,
                     ": a [[certificate]] needs --tls-client-ca, by which the server asks clients "
                     "for certificates"));
  }
  return entries;
}

}  // namespace logprobd
