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

/// Transport of the rows of one request, and the memory that is held until the response arrives.
struct Placement {
  Transport transport = Transport::kTcp;
  std::string reason = {};  ///< Why no faster transport is used; empty if there is none.
  std::optional<SharedSpan> shared = {};  ///< The rows in shared memory.
  std::optional<DeviceRows> device = {};  ///< The request's rows in GPU memory.
  /// The lease that `shared` and `device` belong to; null if both are empty.
  std::shared_ptr<LocalLease> lease = {};
  /// Keeps the slot allocated. After a timeout the server may still read the slot; data that is
  /// written there next then changes only the scores of the abandoned request.
  std::shared_ptr<const void> slot = {};
};

/// Returns whether the server refused the location of the rows and not the request itself. The same
/// request with another placement may then succeed; a plain retry does not.
bool IsPlacementRefusal(const absl::Status& status);

/// Chooses the transport of each request to one server, and keeps the lease and the memory shared
/// with the server. Each client has one. Thread-safe.
///
/// It opens no connection before Offer has described how to reach the server on this host.
/// Connecting to the control socket and creating memory (20 ms for 64 MiB) run on the caller's
/// thread.
class LocalTransport {
 public:
  struct Options {
    TransportChoice choice = TransportChoice::kAuto;
    Transport inline_transport = Transport::kTcp;  ///< Transport of requests: kTcp or kUnix.
    std::string tcp_reason = "transport is tcp";   ///< Placement::reason when choice is kTcp.
    std::string address = {};                      ///< Used in messages only.
    std::string client_id = {};
    int64_t region_bytes = int64_t{64} << 20;  ///< Size of a region for requests.
    /// Maximum number of copy threads in addition to the caller's, below the number of cores.
    int copy_threads = 3;
    std::function<absl::Time()> now = {};  ///< Monotonic clock.
  };

  /// Smaller requests contain their rows, which takes fewer steps.
  static constexpr int64_t kInlineBytes = int64_t{64} << 10;
  /// After a failure, rows are sent inside requests for this time before shared memory is tried
  /// again.
  static constexpr absl::Duration kRetryAfter = absl::Seconds(10);

  explicit LocalTransport(Options options);
  /// Calls Close().
  ~LocalTransport();

  /// Sets the same-host access that ListHeads describes, or nullopt if there is none.
  void Offer(std::optional<LocalAccess> access);

  /// Places a chunk. Rows for shared memory are copied there once, unless they already lie there.
  /// Returns UNAVAILABLE if the chosen transport is not available, and INVALID_ARGUMENT if it
  /// cannot send these rows.
  absl::StatusOr<Placement> Place(const ScoreArgs& args, const Chunk& chunk);

  /// Returns whether to place and send the request again, because `status` concerns its placement.
  /// The number of such repetitions is bounded.
  bool Refused(const Placement& placement, const absl::Status& status);

  /// Returns the final error of a request: UNAVAILABLE if the chosen transport is not available,
  /// otherwise `status`.
  absl::Status ErrorOf(const Placement& placement, const absl::Status& status) const;

  /// See Client::AllocateRows.
  absl::StatusOr<RowBuffer> AllocateRows(int64_t bytes);

  /// Notes the transport of most rows of a call.
  void Used(Transport transport, std::string reason);
  Transport last() const;
  std::string last_reason() const;

  /// Ends the lease; memory of AllocateRows stays valid. From then on rows are sent inside
  /// requests.
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
  /// Drops the lease. Returns whether to send the failed request again.
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
  std::string last_reason_ ABSL_GUARDED_BY(mutex_) = "nothing has been scored yet";
};

}  // namespace logprobd::client
