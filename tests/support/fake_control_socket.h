#pragma once

#include <grpcpp/support/status.h>

#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "logprobd/v1/local.pb.h"
#include "logprobd/v1/scoring.pb.h"
#include "tests/support/temp_folder.h"

namespace logprobd::testing {

/// A control socket (proto/logprobd/v1/local.proto) that creates regions from memfds and reads the
/// slices that requests refer to. Thread-safe.
class FakeControlSocket {
 public:
  struct Options {
    bool shared_memory = true;
    /// Content of all CUDA IPC allocations, for any handle. If it is empty, CUDA IPC is not
    /// offered.
    std::string device_memory = {};
    int64_t region_bytes_max = int64_t{256} << 20;
    int64_t lease_bytes_max = int64_t{1} << 30;
    uint32_t lease_regions_max = 16;
    /// Text that replaces every reply if it is not empty.
    std::string nonsense = {};
    /// True if regions are refused with replies that pass a descriptor, of "logprobd-refused".
    bool refuses_with_descriptor = false;
  };

  explicit FakeControlSocket(Options options);
  ~FakeControlSocket();

  /// Returns the access that ListHeads describes.
  v1::LocalAccess access() const;

  /// Replaces the slice of a request by its bytes. Returns NOT_FOUND, INVALID_ARGUMENT or the
  /// status of RefuseSlices on failure.
  grpc::Status Fill(v1::ScoreRequest* request) const;

  /// Ends every lease, like a restarting server.
  void DropLeases();
  /// Drops all regions and keeps the leases.
  void LoseRegions();
  /// Refuses slices with `status` from now on. If `status` is OK, slices are accepted again.
  void RefuseSlices(grpc::Status status);

  /// Returns the client_id of each open lease.
  std::vector<std::string> clients() const;
  int64_t num_regions() const;
  /// Returns the bytes of all regions.
  int64_t region_bytes() const;
  /// Waits until no lease is open.
  void WaitForNoLease() const;

 private:
  struct Lease {
    int socket = -1;
    std::string id = {};
    bool is_greeted = false;
    std::string client_id = {};
    std::map<std::string, absl::Span<char>> regions = {};
  };

  void Accept();
  void Serve(Lease* lease);
  /// Answers one request; sets `fd` if the reply passes a file descriptor.
  v1::LocalReply Answer(const v1::LocalRequest& request, Lease* lease, int* fd);
  void Forget(Lease* lease) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const TempFolder folder_;
  const std::string path_ = folder_.path("control.sock");
  int listener_ = -1;

  mutable absl::Mutex mutex_;
  std::list<Lease> leases_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  grpc::Status refusal_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> servers_;  // used by the accepting thread only
  std::thread accepting_;
};

}  // namespace logprobd::testing
