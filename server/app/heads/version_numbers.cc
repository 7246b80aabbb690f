#include "server/app/heads/version_numbers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace logprobd {

void VersionNumbers::RecordStaged(uint64_t number) { highest_ = std::max(highest_, number); }

void VersionNumbers::RecordLive(const WeightsVersion& version) {
  highest_ = std::max(highest_, version.version);
  digests_.try_emplace(version.version, version.sha256);
  highest_live_ = std::max(highest_live_, version.version);
  if (digests_.size() > kDigestsMax) digests_.erase(digests_.begin());
}

void VersionNumbers::SetUnknownDigest(const std::string& sha256) {
  for (auto& [number, digest] : digests_) {
    if (digest.empty()) digest = sha256;
  }
}

std::string VersionNumbers::DigestOf(uint64_t number) const {
  const auto known = digests_.find(number);
  return known == digests_.end() ? "" : known->second;
}

absl::Status VersionNumbers::CheckRises(uint64_t number, uint64_t live) const {
  if (number > highest_live_ || digests_.contains(number)) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat("version: ", number, ", must be above ", highest_live_,
                   live == highest_live_ ? ", which is live" : ", which has been live",
                   ", because the numbers of a head rise; the next free number is ", highest_ + 1,
                   ". A rollback returns to the previous version"));
}

absl::Status VersionNumbers::CheckNames(uint64_t number, absl::string_view sha256) const {
  const auto known = digests_.find(number);
  if (known == digests_.end() || (!sha256.empty() && known->second == sha256)) {
    return absl::OkStatus();
  }
  return absl::AlreadyExistsError(
      absl::StrCat("version ", number, " was the number of other weights",
                   known->second.empty() ? "" : absl::StrCat(" (sha256 ", known->second, ")"),
                   ", to which clients may be pinned; the next free number is ", highest_ + 1));
}

}  // namespace logprobd
