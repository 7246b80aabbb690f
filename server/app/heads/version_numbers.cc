#include "server/app/heads/version_numbers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace logprobd {

void VersionNumbers::RecordStaged(uint64_t number) { highest_ = std::max(highest_, number); }

void VersionNumbers::RecordLive(const WeightsVersion& version) {
  highest_ = std::max(highest_, version.version);
  digests_.try_emplace(version.version, version.sha256);
  if (digests_.size() > kDigestsMax) {
    highest_forgotten_ = std::max(highest_forgotten_, digests_.begin()->first);
    digests_.erase(digests_.begin());
  }
}

void VersionNumbers::SetUnknownDigest(const std::string& sha256) {
  for (auto& [number, digest] : digests_) {
    if (digest.empty()) {
      digest = sha256;
    }
  }
}

std::string VersionNumbers::DigestOf(uint64_t number) const {
  const auto known = digests_.find(number);
  return known == digests_.end() ? "" : known->second;
}

absl::Status VersionNumbers::CheckNames(uint64_t number, absl::string_view sha256) const {
  const auto known = digests_.find(number);
  const bool is_forgotten = known == digests_.end() && number <= highest_forgotten_;
  if (!is_forgotten && (known == digests_.end() || (!sha256.empty() && known->second == sha256))) {
    return absl::OkStatus();
  }
  return absl::AlreadyExistsError(absl::StrCat(
      "version ", number, " was the number of other weights",
      is_forgotten || known->second.empty() ? "" : absl::StrCat(" (sha256 ", known->second, ")"),
      ", to which clients may be pinned; the next free number is ", highest_ + 1));
}

}  // namespace logprobd
