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

/// The version of the weights that a call uses, and the servers that do not hold it. Thread-safe.
///
/// A call keeps the pinned version, or the version of the first response. If no ready server holds
/// that version any more, an unpinned call restarts with the version that is live; rows scored
/// before are then scored again. With `mix` the call accepts every version.
class CallVersions {
 public:
  struct Options {
    std::string head = {};
    uint64_t pinned = 0;  ///< Requested version; 0 means the live version.
    bool mix = false;
  };

  /// `balance` must outlive this.
  CallVersions(Balance& balance, Options options);

  /// Returns the servers to which a request of this call may be sent.
  ServerPreference preference() const;
  /// Notes that a request is sent to this server. Until a response arrives, the call expects this
  /// server's version.
  void Asked(const Balance::Taken& server);

  /// Returns the number of restarts so far. Each request stores the epoch in which it was sent.
  int epoch() const;

  /// Notes a response to a request of that epoch. Returns false if another version scored it, so
  /// that the request must be sent again. Returns ABORTED, with the versions and addresses, if no
  /// version can score the whole call.
  absl::StatusOr<bool> Keeps(const std::string& address, uint64_t version, int epoch);

  /// Notes that the server does not hold the pinned version. Returns whether another server may
  /// hold it.
  bool Lacks(const std::string& address);

  /// Must be called if no server was found. Restarts the call and returns true if all ready servers
  /// hold another version. Returns ABORTED like Keeps.
  absl::StatusOr<bool> Stuck();

  /// Returns the version that the call keeps; chunks that another version scored are sent again.
  /// Returns 0 if there is none yet or if every version is accepted.
  uint64_t kept() const;

  /// Returns the error, which names the versions and the servers that hold them.
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
