#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/base/head_info.h"
#include "server/base/score_request.h"
#include "server/metrics/snapshot.h"

namespace logprobd {

/// The server's metrics: names, labels and units are in README.md of this folder. Thread-safe;
/// what records and sets is cheap enough for a request's path.
///
/// Labels come from bounded sets: a head not configured is "unknown". All label sets are created
/// at zero, so that rates exist from the first scrape.
class Metrics {
 public:
  struct Options {
    std::vector<std::string> heads = {};  ///< Configured head names.
    std::string version = {};
    std::string commit = {};
    /// CUDA device ordinals of the GPUs that are used: each has its series in the GPU families.
    std::vector<int> gpus = {};
    /// Where they sit, by ordinal, for the driver's readings; see Nvml::Read. May lack any.
    std::map<int, std::string> gpu_pci_bus_ids = {};
  };

  enum class Method { kScore, kScoreStream, kListHeads, kVerify };
  enum class Transport { kTcp, kShm, kCudaIpc };
  enum class Stage { kReceive, kCopy, kQueue, kH2d, kKernel, kCombine, kD2h, kReply };
  /// How a replacement of a head's weights ended.
  enum class WeightsSwap { kCommitted, kRolledBack, kFailed, kCancelled };
  using Rejection = logprobd::Rejection;
  /// Where a request was when it was cancelled or its deadline passed.
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
  /// `kind` is cuda or out_of_memory; any other counts as "other".
  void RecordGpuError(int gpu, absl::string_view kind);
  /// An error of what GPUs do together; counted where there are several. `kind` is nccl, peer or
  /// timeout; any other counts as "other".
  void RecordCollectiveError(int gpu, absl::string_view kind);

  struct QueueState {
    int64_t rows = 0;
    int64_t bytes = 0;
    int64_t requests = 0;
  };
  void SetQueue(absl::string_view head, Priority priority, const QueueState& state);
  void SetQueueOldestAge(absl::string_view head, double seconds);
  /// The bound of inflight_bytes, which is the sum of what SetQueue said.
  void SetInflightBytesLimit(int64_t limit);
  void SetHead(const HeadInfo& info);
  void SetReady(absl::string_view head, bool ready);
  /// Replicas that score, and those that no longer do.
  void SetReplicas(absl::string_view head, int64_t healthy, int64_t failed);
  void RecordWeightsLoad(absl::string_view head, double seconds);
  void RecordWeightsSwap(absl::string_view head, WeightsSwap result);
  void SetMemory(const MemoryPlan& plan);
  /// Shared-memory regions of clients that are mapped now, and their size together.
  void SetShmRegions(int64_t regions, int64_t bytes);
  /// CUDA IPC mappings of clients that are open now.
  void SetCudaIpcMappings(int64_t mappings);

  /// Asks the driver for its figures of the GPUs: Serialize does so too, Snapshot takes the last
  /// ones. As slow as the driver, which may hang where a GPU is lost: that holds up one caller, the
  /// others a second.
  void ReadGpus();
  /// A fraction of a millisecond.
  MetricsSnapshot Snapshot() const;

  /// The Prometheus text format, with process_* and, where there are GPUs, NVML's readings taken
  /// now.
  std::string Serialize() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
