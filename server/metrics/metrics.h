#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/base/errors.h"
#include "server/base/head_info.h"
#include "server/base/score_request.h"
#include "server/metrics/snapshot.h"

namespace logprobd {

/// The server's metrics. README.md of this folder lists their names, labels and units. Thread-safe.
/// The Record and Set methods are cheap enough to be called for every request.
///
/// Label values come from bounded sets: a head that is not configured counts as "unknown". Series
/// are created with value zero, so that rates exist from the first scrape.
class Metrics {
 public:
  struct Options {
    std::vector<std::string> heads = {};  ///< Names of the configured heads.
    std::string version = {};
    std::string commit = {};
    std::string grpc = {};  ///< Version of gRPC.
    /// CUDA ordinals of the GPUs that the server uses; each has a series in the GPU families.
    std::vector<int> gpus = {};
    /// Known PCI bus IDs by ordinal, for the driver's readings; see Nvml::Read.
    std::map<int, std::string> gpu_pci_bus_ids = {};
  };

  enum class Method { kScore, kScoreStream, kListHeads, kVerify };
  enum class Transport { kTcp, kShm, kCudaIpc };
  enum class Stage { kReceive, kCopy, kQueue, kH2d, kKernel, kCombine, kD2h, kReply };
  /// How a replacement of a head's weights ended.
  enum class WeightsSwap { kCommitted, kRolledBack, kFailed, kCancelled, kDiscarded };
  using Rejection = logprobd::Rejection;
  /// Why a client's certificate was refused.
  enum class TlsRefusal { kRevoked, kListExpired, kOther };
  /// The stage in which a request was when it was cancelled or its deadline passed.
  enum class LeftAt { kArrival, kQueue, kEngine };

  explicit Metrics(const Options& options);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  void RecordRequest(Method method, absl::string_view head, absl::StatusCode code, double seconds,
                     Transport transport);
  void RecordStage(Stage stage, double seconds);
  void RecordRows(absl::string_view head, int64_t scored, int64_t ignored, int64_t nonfinite);
  void RecordBatch(absl::string_view head, int64_t rows, int64_t requests);
  void RecordRejection(Rejection reason);
  void RecordCancelled(LeftAt stage);
  void RecordDeadlineExceeded(LeftAt stage);
  void RecordReceived(Transport transport, int64_t bytes);
  void RecordSent(Transport transport, int64_t bytes);
  void RecordFlops(int gpu, double flops, double busy_seconds);
  /// `kind` is cuda or out_of_memory; any other kind counts as "other".
  void RecordGpuError(int gpu, absl::string_view kind);
  /// Counts an error in an operation between GPUs; ignored with one GPU. `kind` is nccl, peer or
  /// timeout; any other kind counts as "other".
  void RecordCollectiveError(int gpu, absl::string_view kind);

  /// Marks a GPU whose sums differ between the paths of the engine (server/engine/equal_sums.h).
  void SetUnequalSums(int gpu);

  struct QueueState {
    int64_t rows = 0;
    int64_t bytes = 0;
    int64_t requests = 0;
  };
  void SetQueue(absl::string_view head, Priority priority, const QueueState& state);
  void SetQueueOldestAge(absl::string_view head, double seconds);
  /// Sets the limit of inflight_bytes, which is the sum of the bytes that SetQueue reported.
  void SetInflightBytesLimit(int64_t limit);
  void SetHead(const HeadInfo& info);
  void SetReady(absl::string_view head, bool ready);
  /// Sets the number of replicas that score and of those that no longer do.
  void SetReplicas(absl::string_view head, int64_t healthy, int64_t failed);
  void RecordWeightsLoad(absl::string_view head, double seconds);
  void RecordWeightsSwap(absl::string_view head, WeightsSwap result);
  void SetMemory(const MemoryPlan& plan);
  /// Sets the number and the total size of the clients' shared-memory regions that are mapped now.
  void SetShmRegions(int64_t regions, int64_t bytes);
  /// Sets the number of the clients' CUDA IPC mappings that are open now.
  void SetCudaIpcMappings(int64_t mappings);
  /// Counts an attempt to read the TLS certificates again.
  void RecordTlsReload(bool is_ok);
  /// Sets the time at which the first certificate of the server's chain expires. The series exists
  /// from the first call on.
  void SetTlsCertificateExpiry(absl::Time expiry);
  /// Sets the time at which the first revocation list expires, and the number of lists that cannot
  /// be used or are missing. The series exist from the first call on.
  void SetTlsRevocation(absl::Time expiry, int64_t problems);
  /// Counts a client whose certificate was refused by revocation lists.
  void RecordTlsRefusal(TlsRefusal reason);

  /// Marks the listener of `flag`, such as "--listen", as one that others can use without
  /// authentication.
  void SetInsecureListener(absl::string_view flag);

  /// Asks the driver for its readings of the GPUs. Serialize does so too; Snapshot uses the last
  /// readings. The call takes as long as the driver takes to answer. The driver may hang when a GPU
  /// is lost; then one caller hangs and the others return after a second.
  void ReadGpus();
  /// Copies all metrics. Takes a fraction of a millisecond.
  MetricsSnapshot Snapshot() const;

  /// Returns all metrics in the Prometheus text format, with current values of process_* and
  /// current NVML readings of the GPUs.
  std::string Serialize() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
