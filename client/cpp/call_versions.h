#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/balance.h"

namespace logprobd::client {

/// The version of the weights that a call is scored with, and which servers do not hold it.
/// Thread-safe.
///
/// The first version seen, or the pinned one, is kept. When no ready server holds it any more, an
/// unpinned call goes on with the version that is there; what was scored before is then scored
/// again. With `mix` every version is taken.
class CallVersions {
 public:
  /// How often a call over several servers is begun again with another version.
  static constexpr int kRestartsMax = 3;

  struct Options {
    std::string head = {};
    uint64_t pinned = 0;  ///< 0: whichever is live.
    bool mix = false;
  };

  /// `balance` must outlive this.
  CallVersions(Balance& balance, Options options);

  /// Where a request of this call may go.
  ServerPreference preference() const;
  /// A request goes to this server: until an answer says more, the call keeps to its version.
  void Asked(const Balance::Taken& server);

  /// The restarts so far. A request remembers those of its sending.
  int epoch() const;

  /// Takes note of an answer to a request of that epoch. False: it is of another version, ask again
  /// elsewhere. ABORTED names versions and addresses when one version cannot finish the call.
  absl::StatusOr<bool> Keeps(const std::string& address, uint64_t version, int epoch);

  /// The server says that the pinned version is not live there. Whether to ask elsewhere.
  bool Lacks(const std::string& address);

  /// No server was found. Whether that is because all ready ones hold another version; the call is
  /// then begun again with theirs. ABORTED as Keeps.
  absl::StatusOr<bool> Stuck();

  /// The version kept: answers of others are to be asked again. 0: none yet, or all are taken.
  uint64_t kept() const;

  /// The error, naming versions and where they were seen.
  absl::Status Mismatch() const;

 private:
  absl::Status Restart(uint64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status MismatchLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Balance& balance_;
  const Options options_;
  mutable absl::Mutex mutex_;
  uint64_t kept_ ABSL_GUARDED_BY(mutex_);
  bool has_kept_ ABSL_GUARDED_BY(mutex_);
  uint64_t expected_ ABSL_GUARDED_BY(mutex_);
  int epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<std::string> others_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::set<std::string>> seen_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd::client
