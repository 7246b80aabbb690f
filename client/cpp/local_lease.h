#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/cpp/server_info.h"

namespace logprobd::v1 {
class LocalReply;
class LocalRequest;
}  // namespace logprobd::v1

namespace logprobd::client {

/// Memory that the server created and that is mapped into this process with all pages resident. It
/// is unmapped when the last reference is released.
class SharedRegion {
 public:
  SharedRegion(std::string id, absl::Span<std::byte> bytes) : id_(std::move(id)), bytes_(bytes) {}
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  const std::string& id() const { return id_; }
  absl::Span<std::byte> bytes() const { return bytes_; }

 private:
  const std::string id_;
  const absl::Span<std::byte> bytes_;
};

/// The limits of a server for one client.
struct LocalGrant {
  std::string lease;  ///< 16 bytes.
  bool shared_memory = false;
  bool cuda_ipc = false;
  int64_t region_bytes_max = 0;
  int64_t lease_bytes_max = 0;
  int64_t regions_max = 0;
};

/// A connection to the control socket of a same-host server (proto/logprobd/v1/local.proto). The
/// server reclaims its regions when the connection ends. Thread-safe; a call waits at most 10 s.
class LocalLease {
 public:
  /// Errors: FAILED_PRECONDITION (another host, or no socket), UNAVAILABLE (nobody listens),
  /// PERMISSION_DENIED, or the server's own error.
  static absl::StatusOr<std::shared_ptr<LocalLease>> Connect(const LocalAccess& access,
                                                             const std::string& client_id);
  ~LocalLease();
  LocalLease(const LocalLease&) = delete;
  LocalLease& operator=(const LocalLease&) = delete;

  const LocalGrant& grant() const { return grant_; }

  /// Returns false once the server has closed the connection, and after Close.
  bool IsAlive();

  /// Creates a region of at least `bytes` bytes. Returns RESOURCE_EXHAUSTED if this would exceed
  /// the server's limits.
  absl::StatusOr<std::shared_ptr<SharedRegion>> CreateRegion(int64_t bytes);

  /// Makes the server drop a region. The mapping in this process stays valid.
  absl::Status CloseRegion(const std::string& id);

  /// Ends the lease. In a forked child it closes only the child's descriptor.
  void Close();

 private:
  explicit LocalLease(int socket) : socket_(socket) {}

  /// Sends `request` and reads its reply. `fd` is set to the file descriptor that came with it,
  /// which the caller owns, or to -1. If a socket operation fails, the socket is closed.
  absl::Status Ask(const v1::LocalRequest& request, v1::LocalReply* reply, int* fd);
  bool HasEnded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  LocalGrant grant_;
  absl::Mutex mutex_;
  int socket_ ABSL_GUARDED_BY(mutex_);
};

/// Returns the kernel's boot id, which differs between hosts and between boots; empty if none.
std::string BootId();

}  // namespace logprobd::client
