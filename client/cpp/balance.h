#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// Describes the first difference between two servers' heads that affects scores (names, model
/// type, vocabulary, hidden size, dtype, scale, soft cap, bias). Returns "" if there is none.
std::string DescribeDifference(const ServerInfo& first, const ServerInfo& second);

/// Returns the heads of the first server with the tightest limits of all servers. `servers` must
/// hold the same heads and must not be empty.
ServerInfo TightestLimits(const std::vector<ServerInfo>& servers);

/// The servers to which a request may be sent.
struct ServerPreference {
  std::string head = {};                ///< Empty means the only head.
  uint64_t version = 0;                 ///< Servers that may hold it are preferred; 0 means any.
  std::set<std::string> excluded = {};  ///< Addresses that must not be used.
};

/// Decides which server gets the next request, and which servers get none for a while. It does no
/// I/O and takes its clock as an option. Thread-safe.
///
/// A request is sent to the ready server with the fewest unanswered bytes of this client; servers
/// with equal bytes take turns. Addresses identify servers. Calls about a removed server have no
/// effect. One that was removed and added again has a new record: requests and checks from before
/// count no more, but failures and refusals concern whatever serves at the address.
class Balance {
 public:
  struct Options {
    /// True if there is one server, which is always used.
    bool solo = false;
    std::function<absl::Time()> now;
    std::function<double()> unit_random;  ///< Returns numbers in [0, 1); thread-safe.
  };

  struct Taken {
    std::string address;
    uint64_t record = 0;   ///< Tells the server's record from others of its address.
    uint64_t version = 0;  ///< Version of the preferred head that it probably holds; 0 if unknown.
  };

  /// Selects the servers to check.
  enum class Due {
    kTimely,  ///< Servers whose check is due.
    kIdle,    ///< Also servers that are out, before their pause ends, because none is ready.
    kAll      ///< Every server.
  };

  Balance(Options options, const std::vector<std::string>& addresses);

  bool is_solo() const { return options_.solo; }

  /// Sets the servers that exist now; known servers keep their records. The addresses are distinct.
  void SetAddresses(const std::vector<std::string>& addresses);

  /// Returns the server for a request of `bytes`, which count as the server's load until Release,
  /// or nullopt if no server is ready. Returns FAILED_PRECONDITION if servers hold different heads;
  /// the message names both servers.
  absl::StatusOr<std::optional<Taken>> Take(int64_t bytes, const ServerPreference& preference);
  /// Notes that a request of `bytes` that Take gave to `taken` has ended, with or without success.
  void Release(const Taken& taken, int64_t bytes);

  /// Notes that the server has answered a request for `head` with `version`.
  void SawVersion(const std::string& address, const std::string& head, uint64_t version);
  /// Notes that the server failed or is stopping: it gets no requests until a check succeeds.
  /// Requests that fail together count as one failure.
  void Leave(const std::string& address, const std::string& reason);
  /// Notes that the server refused a request because of load: it is avoided for `delay`, its hint,
  /// or for policy::kBusy without a hint. A negative hint does not make it busy.
  void Busy(const std::string& address, std::optional<absl::Duration> delay);

  /// Returns whether a request that failed at `address` can be sent to another server at once.
  bool HasOther(const std::string& address, const ServerPreference& preference) const;
  /// Returns whether any ready server is not in `excluded`.
  bool HasReadyExcept(const std::set<std::string>& excluded) const;
  /// Returns the servers that may get requests.
  std::vector<std::string> ready() const;

  /// Returns the servers to check now; Checked must follow for each.
  std::vector<std::string> TakeDueChecks(Due due);
  /// Notes the result of a check that began at `began`: the server's info, or the error.
  void Checked(const std::string& address, const absl::StatusOr<ServerInfo>& info,
               absl::Time began);
  /// Returns the number of servers whose check is running.
  int64_t num_checked() const;

  /// Returns the heads with the tightest limits of all ready servers. Returns FAILED_PRECONDITION
  /// like Take, and UNAVAILABLE if no server is ready; that message lists `notes`, then each server
  /// and why it is not ready.
  absl::StatusOr<ServerInfo> Heads(const std::vector<std::string>& notes) const;

  /// Returns the time at which a server was last excluded by a failure or by Leave.
  absl::Time last_left() const;

  std::vector<ServerState> states() const;

 private:
  struct Server {
    std::string address;
    uint64_t record = 0;
    absl::Time added_at = absl::InfinitePast();
    bool is_ready = false;
    bool is_out = false;
    std::string reason;
    int64_t requests = 0;
    int64_t bytes = 0;
    int failures = 0;
    bool is_checked = false;  // a check is running
    absl::Time check_at = absl::InfinitePast();
    absl::Time busy_until = absl::InfinitePast();
    absl::Time left_at = absl::InfinitePast();
    ServerInfo info;
    /// Latest known version of each head, and the time at which it was seen.
    std::map<std::string, std::pair<uint64_t, absl::Time>> versions;

    std::string HeadKey(const std::string& head) const;
    uint64_t Version(const std::string& head, absl::Time now) const;
  };

  Server* Find(const std::string& address) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsUsable(const Server& server) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Returns the indices of the usable servers that are not excluded: those that may hold the
  /// preferred version, or all of them if there is none.
  std::vector<size_t> Choose(const ServerPreference& preference, absl::Time now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PutOut(Server& server, const std::string& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CompareHeads() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  mutable absl::Mutex mutex_;
  std::vector<Server> servers_ ABSL_GUARDED_BY(mutex_);
  uint64_t num_records_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t turn_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string conflict_ ABSL_GUARDED_BY(mutex_);
  absl::Time last_left_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace logprobd::client
