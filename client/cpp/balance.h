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

/// How the heads of two servers differ in what scores depend on (vocabulary, hidden size, dtype,
/// scale, soft cap, bias); empty where they do not.
std::string DescribeDifference(const ServerInfo& first, const ServerInfo& second);

/// The heads of the first server, with the tightest limits of all. `servers` hold the same heads
/// and are not empty.
ServerInfo TightestLimits(const std::vector<ServerInfo>& servers);

/// Which servers a request may go to.
struct ServerPreference {
  std::string head = {};                ///< Empty: the only one.
  uint64_t version = 0;                 ///< Servers believed to hold it are preferred; 0: any.
  std::set<std::string> excluded = {};  ///< Addresses that are no use.
};

/// Which server gets the next request, and which is left alone for a while. Pure: no input or
/// output, and time is an argument. Thread-safe.
///
/// A request goes to the ready server with the fewest unanswered bytes of this client; equals take
/// turns. Servers are known by their addresses. A server that went meanwhile is ignored.
class Balance {
 public:
  /// A server in use is asked for its health and its heads this often.
  static constexpr absl::Duration kCheckPeriod = absl::Seconds(10);
  /// How long a server that failed is left alone: doubled with each failure, drawn from the upper
  /// half.
  static constexpr absl::Duration kBackoffFirst = absl::Milliseconds(500);
  static constexpr absl::Duration kBackoffMax = absl::Seconds(30);
  /// How long a server that refused for load without a hint is not preferred.
  static constexpr absl::Duration kBusy = absl::Milliseconds(100);
  /// How long a server is believed to hold the version that it named last.
  static constexpr absl::Duration kVersionAge = absl::Seconds(10);

  struct Options {
    /// There is one server, which is used whatever happened to it.
    bool solo = false;
    std::function<absl::Time()> now;
    std::function<double()> unit_random;  ///< In [0, 1), thread-safe.
  };

  struct Taken {
    std::string address;
    uint64_t version = 0;  ///< That it is believed to hold of the wished head; 0: not known.
  };

  /// Which servers to check.
  enum class Due {
    kTimely,  ///< Those whose time has come.
    kIdle,    ///< Also those that are out: nobody is ready, so their pause is cut short.
    kAll
  };

  Balance(Options options, const std::vector<std::string>& addresses);

  bool is_solo() const { return options_.solo; }

  /// Takes the servers that exist now; those that stay keep what is known of them.
  void SetAddresses(const std::vector<std::string>& addresses);

  /// The server for a request of `bytes`, which count as its work until Give. Nothing when no
  /// server is ready. FAILED_PRECONDITION when servers hold different heads; it names both.
  absl::StatusOr<std::optional<Taken>> Take(int64_t bytes, const ServerPreference& preference);
  /// The request has ended, in whatever way.
  void Give(const std::string& address, int64_t bytes);

  /// The server has answered a request for `head`.
  void SawVersion(const std::string& address, const std::string& head, uint64_t version);
  /// The server failed, or said that it stops: it is left alone until a check finds it well.
  /// Requests that fail together count as one failure.
  void Leave(const std::string& address, const std::string& reason);
  /// The server refused for load: others are preferred for `delay`, its hint.
  void Busy(const std::string& address, std::optional<absl::Duration> delay);

  /// Whether a request that `address` failed can go elsewhere without waiting.
  bool HasOther(const std::string& address, const ServerPreference& preference) const;
  /// Whether a ready server is not in `without`.
  bool HasReadyExcept(const std::set<std::string>& excluded) const;
  /// Servers that may be sent requests.
  std::vector<std::string> ready() const;

  /// The servers to be checked now; Checked must follow for each.
  std::vector<std::string> TakeDueChecks(Due due);
  /// A check, begun at `began`, has ended: with what the server lists, or with what is wrong.
  void Checked(const std::string& address, const absl::StatusOr<ServerInfo>& info,
               absl::Time began);
  /// Servers whose check is under way.
  int64_t num_checked() const;

  /// The heads, with the tightest limits of all ready servers. FAILED_PRECONDITION as Take;
  /// UNAVAILABLE when no server is ready, naming each and why, after `notes`.
  absl::StatusOr<ServerInfo> Heads(const std::vector<std::string>& notes) const;

  /// When a server was put out last.
  absl::Time last_left() const;

  std::vector<ServerState> states() const;

 private:
  struct Server {
    std::string address;
    bool is_ready = false;
    bool is_out = false;
    std::string reason;
    int64_t requests = 0;
    int64_t bytes = 0;
    int failures = 0;
    bool is_checked = false;  // a check is under way
    absl::Time check_at = absl::InfinitePast();
    absl::Time busy_until = absl::InfinitePast();
    absl::Time left_at = absl::InfinitePast();
    ServerInfo info;
    /// By head: the version seen last, and when.
    std::map<std::string, std::pair<uint64_t, absl::Time>> versions;

    std::string HeadKey(const std::string& head) const;
    uint64_t Version(const std::string& head, absl::Time now) const;
  };

  Server* Find(const std::string& address) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsUsable(const Server& server) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Indices of the servers that fit the wish: those believed to hold its version, or else all that
  /// are not excluded.
  std::vector<size_t> Choose(const ServerPreference& preference, absl::Time now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PutOut(Server& server, const std::string& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CompareHeads() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  mutable absl::Mutex mutex_;
  std::vector<Server> servers_ ABSL_GUARDED_BY(mutex_);
  size_t turn_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string conflict_ ABSL_GUARDED_BY(mutex_);
  absl::Time last_left_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace logprobd::client
