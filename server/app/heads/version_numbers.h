#pragma once

#include <cstdint>
#include <string>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/base/weight_store.h"

namespace logprobd {

/// The numbers of the versions that a head has had. They rise, so that a client can tell which of
/// two versions is newer. A number never means two weights to a client that pins it, so the number
/// of a version that was live belongs to the digest of its weights for as long as the process runs.
/// Not thread-safe.
class VersionNumbers {
 public:
  /// Maximum number of versions whose digests are remembered. The lowest numbers are forgotten, and
  /// their weights cannot return under them.
  static constexpr size_t kDigestsMax = 4'096;

  /// Returns the highest number that a staged or live version has ever had.
  uint64_t highest() const { return highest_; }

  void RecordStaged(uint64_t number);
  /// Records that `version` is live. Its digest may be empty until SetUnknownDigest.
  void RecordLive(const WeightsVersion& version);
  /// Sets the digest of the version that was recorded without one.
  void SetUnknownDigest(const std::string& sha256);

  /// Returns the digest of a version that has been live, or an empty string if it is not known.
  std::string DigestOf(uint64_t number) const;

  /// Returns ALREADY_EXISTS unless the number is above all that have been live or is one of them,
  /// whose weights may return. `live` is the version that is live now, which the message names.
  absl::Status CheckRises(uint64_t number, uint64_t live) const;

  /// Returns ALREADY_EXISTS if the number belongs to weights whose digest is not `sha256`.
  absl::Status CheckNames(uint64_t number, absl::string_view sha256) const;

 private:
  uint64_t highest_ = 0;
  uint64_t highest_live_ = 0;
  absl::btree_map<uint64_t, std::string> digests_;  // of the versions that have been live
};

}  // namespace logprobd
