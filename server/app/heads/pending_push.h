#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/weight_store.h"
#include "server/weights/pushed_weights.h"

namespace logprobd {

/// The version of which calls of Push send rows to one head, until it is staged or dropped. There
/// is at most one. Not thread-safe; its times are those of one Clock.
class PendingPush {
 public:
  struct Version {
    WeightsPush header;
    std::shared_ptr<PushedWeights> rows;  ///< Null until its first call has taken the memory.
    int num_calls = 0;                    ///< Number of calls that have joined and not left.
    bool is_busy = false;    ///< True while one call takes the memory or stages the rows.
    bool is_staged = false;  ///< True if the version has ended by being staged.
    absl::Time left_at;      ///< Time at which the last call left.
    /// An incomplete version that was dropped for this one. Frees its memory when it is destroyed.
    std::shared_ptr<const Version> replaced;
  };

  /// Begins a call's part in the version of `push` and returns it. If it is new, `rows` is null and
  /// the call must take the memory and call EndOpen. Returns null while the version is busy: the
  /// call must wait. Errors:
  ///   INVALID_ARGUMENT  the header differs from that of the version's first call
  ///   ABORTED           calls are sending rows of another version
  absl::StatusOr<std::shared_ptr<Version>> Join(const WeightsPush& push);
  /// Sets the rows of a new version, or drops it and returns the error of `rows`. Returns ABORTED
  /// if the version was dropped meanwhile.
  absl::Status EndOpen(const std::shared_ptr<Version>& version,
                       absl::StatusOr<std::shared_ptr<PushedWeights>> rows);
  /// Ends a call's part, whose stream was read to its end if `has_all`. Returns whether the call
  /// must stage the version and call EndStaging, because all rows have arrived. Returns ABORTED if
  /// the version was dropped before they had.
  absl::StatusOr<bool> Leave(const std::shared_ptr<Version>& version, bool has_all, absl::Time now);
  /// Returns ABORTED if the version was dropped since Leave. Call it before the staging changes
  /// anything, while Drop is not possible.
  absl::Status CheckNotDropped(const std::shared_ptr<Version>& version) const;
  /// Ends the staging. The rows stay for another attempt if `staged` is an error that may pass.
  void EndStaging(const std::shared_ptr<Version>& version, const absl::Status& staged,
                  absl::Time now);

  /// Drops the version and returns it, or null if there is none. Its calls learn of it in Leave.
  [[nodiscard]] std::shared_ptr<const Version> Drop();
  /// Drops a version of which no call has sent rows since `since`, and returns it.
  [[nodiscard]] std::shared_ptr<const Version> DropUnusedSince(absl::Time since);

  bool is_busy() const { return version_ != nullptr && version_->is_busy; }
  int64_t memory_bytes() const;
  std::optional<PushedVersion> state() const;

 private:
  std::shared_ptr<Version> version_;
};

}  // namespace logprobd
