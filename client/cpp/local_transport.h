#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/chunk_plan.h"
#include "client/cpp/local_lease.h"
#include "client/cpp/score.h"
#include "client/cpp/server_info.h"
#include "client/cpp/shared_rows.h"

namespace logprobd::client {

/// How the rows of one request travel, and what is held until it is answered.
struct Placement {
  Transport transport = Transport::kTcp;
  std::string reason = {};  ///< Why not a shorter way; empty where there is none.
  std::optional<SharedSpan> shared = {};
  std::optional<DeviceRows> device = {};  ///< Of the request's own rows.
  /// The lease that `shared` and `device` belong to; null where both are empty.
  std::shared_ptr<LocalLease> lease = {};
  /// Keeps the slot. After a timeout the server may still read it; what is written there next then
  /// spoils the scores of that dead request alone.
  std::shared_ptr<const void> slot = {};
};

/// Whether a request was refused for where its rows lie: no retry will help, but another way may.
bool IsPlacementRefusal(const absl::Status& status);

/// Decides the way of each request to one server, and keeps the lease and the memory shared with
/// it. One object a client. Thread-safe.
///
/// Nothing is opened before Offer has said that the server can be reached locally. The control
/// socket is asked on the caller's thread: to connect, and for memory (20 ms for 64 MiB).
class LocalTransport {
 public:
  struct Options {
    TransportChoice choice = TransportChoice::kAuto;
    Transport inline_transport = Transport::kTcp;  ///< kTcp or kUnix: how requests travel.
    std::string tcp_reason = "transport is tcp";   ///< Of a choice of kTcp.
    std::string address = {};                      ///< For messages.
    std::string client_id = {};
    int64_t region_bytes = int64_t{64} << 20;  ///< Of a region for requests.
    int copy_threads = 3;                      ///< Most, beside the caller's; no more than cores.
    std::function<absl::Time()> now = {};      ///< Monotonic.
  };

  /// Below it a request's rows travel in the request: that takes fewer steps.
  static constexpr int64_t kInlineBytes = int64_t{64} << 10;
  /// After a failure TCP is used this long before the local way is tried again.
  static constexpr absl::Duration kRetryAfter = absl::Seconds(10);

  explicit LocalTransport(Options options);
  /// Close().
  ~LocalTransport();

  /// What ListHeads says of local access.
  void Offer(std::optional<LocalAccess> access);

  /// The way of a chunk; rows that go through shared memory are copied there once, unless they lie
  /// there. UNAVAILABLE when the way that was chosen cannot be had, INVALID_ARGUMENT when such rows
  /// cannot take it.
  absl::StatusOr<Placement> Place(const ScoreArgs& args, const Chunk& chunk);

  /// Whether the request is to be placed and sent again: `status` is about its way. No way is tried
  /// for ever.
  bool Refused(const Placement& placement, const absl::Status& status);

  /// The error of a request that is not sent again: UNAVAILABLE where the way that was chosen
  /// cannot be had.
  absl::Status ErrorOf(const Placement& placement, const absl::Status& status) const;

  /// As Client::AllocateRows.
  absl::StatusOr<RowBuffer> AllocateRows(int64_t bytes);

  /// Notes what a call used.
  void Used(Transport transport, std::string reason);
  Transport last() const;
  std::string last_reason() const;

  /// Gives the lease back; rows of AllocateRows stay. From then on rows travel in requests.
  void Close();

 private:
  struct Shared {
    std::shared_ptr<LocalLease> lease;
    std::shared_ptr<RegionPool> pool;
  };
  struct DisabledDevice {
    std::string reason;
    absl::Time until;
  };

  absl::StatusOr<Placement> PlaceOnDevice(const ScoreArgs& args, const Chunk& chunk);
  absl::StatusOr<Placement> PlaceInRegion(const ScoreArgs& args, const Chunk& chunk);
  absl::StatusOr<Shared> Connected();
  absl::StatusOr<Shared> WithSharedMemory();
  absl::StatusOr<Shared> Connect() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Gives the lease up; whether sending again makes sense.
  bool DropLease(const absl::Status& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetAfterFork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TransportUnavailable(const std::string& reason) const;
  CopyPool& copies();

  const Options options_;

  mutable absl::Mutex mutex_;
  int64_t pid_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<CopyPool> copies_ ABSL_GUARDED_BY(mutex_);
  std::optional<LocalAccess> access_ ABSL_GUARDED_BY(mutex_);
  std::optional<Shared> shared_ ABSL_GUARDED_BY(mutex_);
  bool is_closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  absl::Time retry_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Time lost_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::flat_hash_map<std::string, DisabledDevice> disabled_devices_
      ABSL_GUARDED_BY(mutex_);  // by UUID
  Transport last_ ABSL_GUARDED_BY(mutex_);
  std::string last_reason_ ABSL_GUARDED_BY(mutex_) = "nothing was scored yet";
};

}  // namespace logprobd::client
