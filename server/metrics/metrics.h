#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/base/head_info.h"
#include "server/base/rejection.h"
#include "server/base/score_request.h"

namespace logprobd {

/// The server's metrics: names, labels and units are in README.md of this folder. Thread-safe;
/// every method is cheap enough for a request's path.
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
  };

  enum class Method { kScore, kScoreStream, kListHeads, kVerify };
  enum class Transport { kTcp, kShm, kCudaIpc };
  enum class Stage { kReceive, kCopy, kQueue, kH2d, kKernel, kCombine, kD2h, kReply };
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
  void SetMemory(const MemoryPlan& plan);

  /// The Prometheus text format, with process_* and, where there are GPUs, NVML's readings taken
  /// now.
  std::string Serialize() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
