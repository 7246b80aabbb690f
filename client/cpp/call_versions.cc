#include "client/cpp/call_versions.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/policy.h"

namespace logprobd::client {

CallVersions::CallVersions(Balance& balance, Options options)
    : balance_(balance),
      options_(std::move(options)),
      kept_(options_.pinned),
      has_kept_(options_.pinned != 0),
      expected_(options_.pinned) {}

ServerPreference CallVersions::preference() const {
  const absl::MutexLock lock(&mutex_);
  return {.head = options_.head, .version = options_.mix ? 0 : expected_, .excluded = others_};
}

void CallVersions::Asked(const Balance::Taken& server) {
  const absl::MutexLock lock(&mutex_);
  if (expected_ == 0) expected_ = server.version;
}

int CallVersions::epoch() const {
  const absl::MutexLock lock(&mutex_);
  return epoch_;
}

absl::StatusOr<bool> CallVersions::Keeps(const std::string& address, uint64_t version, int epoch) {
  const absl::MutexLock lock(&mutex_);
  const bool fits = options_.mix || !has_kept_ || version == kept_;
  // The request was sent before a restart, so its answer says nothing about the new version.
  if (!fits && epoch != epoch_) return false;
  balance_.SawVersion(address, options_.head, version);
  seen_[version].insert(address);
  if (fits) {
    kept_ = expected_ = version;
    has_kept_ = true;
    return true;
  }
  others_.insert(address);
  if (balance_.HasReadyExcept(others_)) return false;
  if (absl::Status status = Restart(version); !status.ok()) return status;
  has_kept_ = true;
  return true;
}

bool CallVersions::Lacks(const std::string& address) {
  const absl::MutexLock lock(&mutex_);
  others_.insert(address);
  return balance_.HasReadyExcept(others_);
}

absl::StatusOr<bool> CallVersions::Stuck() {
  const absl::MutexLock lock(&mutex_);
  if (!balance_.HasReadyExcept({}) || balance_.HasReadyExcept(others_)) return false;
  if (absl::Status status = Restart(0); !status.ok()) return status;
  has_kept_ = false;
  return true;
}

uint64_t CallVersions::kept() const {
  const absl::MutexLock lock(&mutex_);
  return options_.mix ? 0 : kept_;
}

absl::Status CallVersions::Mismatch() const {
  const absl::MutexLock lock(&mutex_);
  return MismatchLocked();
}

absl::Status CallVersions::Restart(uint64_t version) {
  if (options_.pinned != 0 || (epoch_ >= policy::kRestartsMax && !balance_.is_solo())) {
    return MismatchLocked();
  }
  ++epoch_;
  kept_ = expected_ = version;
  others_.clear();
  return absl::OkStatus();
}

absl::Status CallVersions::MismatchLocked() const {
  std::vector<std::string> seen;
  for (const auto& [version, addresses] : seen_) {
    seen.push_back(absl::StrCat("version ", version, " at ", absl::StrJoin(addresses, ", ")));
  }
  if (seen.empty()) seen.push_back(absl::StrCat(absl::StrJoin(others_, ", "), " does not hold it"));
  return absl::AbortedError(absl::StrCat(
      "the call could not be scored by ",
      options_.pinned != 0 ? absl::StrCat("version ", options_.pinned) : "one version",
      " of the weights: ", absl::StrJoin(seen, "; "),
      ". Wait until all servers hold the same version, set weights_version to a version that stays "
      "loaded, or allow mix_weights_versions"));
}

}  // namespace logprobd::client
