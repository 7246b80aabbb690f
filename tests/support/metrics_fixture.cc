// Runs the HTTP side of a busy server with two heads on two GPUs, for tests on machines without a
// GPU. It uses the real Metrics, status page and HTTP server with a fake of the driver's library
// and simulated work. It prints its address and ends when its standard input is closed.

#include <poll.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/time/clock.h"
#include "server/app/run/status.h"
#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/http/http_server.h"
#include "server/metrics/metrics.h"
#include "tests/support/full_stderr.h"

namespace logprobd {
namespace {

constexpr int kStepMs = 50;
constexpr int64_t kMib = int64_t{1} << 20;
constexpr int64_t kGib = int64_t{1} << 30;
constexpr int64_t kHidden = 4'096;
constexpr int64_t kVocab = 151'936;
constexpr int64_t kBatchRows = 512;
constexpr const char* kHeads[] = {"policy", "reference <2>"};
constexpr Metrics::Stage kStages[] = {
    Metrics::Stage::kReceive, Metrics::Stage::kCopy,   Metrics::Stage::kQueue,
    Metrics::Stage::kH2d,     Metrics::Stage::kKernel, Metrics::Stage::kCombine,
    Metrics::Stage::kD2h,     Metrics::Stage::kReply,
};

HeadInfo InfoOf(const std::string& name, uint64_t version) {
  HeadInfo info;
  info.name = name;
  info.model_type = "qwen3";
  info.tensor = "lm_head.weight";
  info.hidden_size = kHidden;
  info.vocab_size = kVocab;
  info.vocab_rows = kVocab;
  info.weight_bytes = kVocab * kHidden * 2;
  info.weights_version = version;
  info.engine = "cuda/fused";
  info.engine_reason = "NVIDIA H200, compute capability 9.0; 2 replicas of 1 shard as requested";
  info.layout = {{0, 0, "gpu0", 0, kVocab}, {1, 0, "gpu1", 0, kVocab}};
  return info;
}

MemoryPlan Memory() {
  return {{"gpu0", "weights", 1'187 * kMib}, {"gpu0", "workspace", 900 * kMib},
          {"gpu1", "weights", 1'187 * kMib}, {"gpu1", "workspace", 900 * kMib},
          {"gpu0", "staging", 128 * kMib},   {"gpu1", "staging", 128 * kMib},
          {"host", "staging", 256 * kMib},   {"host", "workspace", 64 * kMib, true},
          {"host", "receive", 2 * kGib}};
}

/// Sets the gauges that do not change during the work. One replica of each head has failed.
void SetGauges(Metrics& metrics) {
  metrics.SetMemory(Memory());
  metrics.SetInflightBytesLimit(kGib);
  metrics.SetShmRegions(2, 512 * kMib);
  metrics.SetCudaIpcMappings(1);
  metrics.SetInsecureListener("--http");
  metrics.SetTlsCertificateExpiry(absl::Now() + absl::Hours(24 * 60));
  metrics.SetTlsRevocation(absl::Now() + absl::Hours(24 * 7), 1);
  for (const char* const head : kHeads) {
    metrics.SetHead(InfoOf(head, 3));
    metrics.SetReady(head, true);
    metrics.SetReplicas(head, 1, 1);
    metrics.RecordWeightsLoad(head, 4.5);
    metrics.SetQueue(head, Priority::kNormal, {.rows = 4'096, .bytes = 32 * kMib, .requests = 8});
    metrics.SetQueueOldestAge(head, 0.004);
  }
}

/// Records the work of one step.
void Work(Metrics& metrics) {
  for (const char* const head : kHeads) {
    metrics.RecordRequest(Metrics::Method::kScore, head, absl::StatusCode::kOk, 0.0021,
                          Metrics::Transport::kTcp);
    metrics.RecordRequest(Metrics::Method::kScoreStream, head, absl::StatusCode::kOk, 0.0015,
                          Metrics::Transport::kShm);
    metrics.RecordRequest(Metrics::Method::kScore, head, absl::StatusCode::kOk, 0.0011,
                          Metrics::Transport::kCudaIpc);
    metrics.RecordRequest(Metrics::Method::kScore, head, absl::StatusCode::kInternal, 0.0009,
                          Metrics::Transport::kTcp);
    metrics.RecordRows(head, kBatchRows, 3, 1);
    metrics.RecordBatch(head, kBatchRows, 3);
    for (const Metrics::WeightsSwap result :
         {Metrics::WeightsSwap::kCommitted, Metrics::WeightsSwap::kRolledBack,
          Metrics::WeightsSwap::kFailed, Metrics::WeightsSwap::kCancelled}) {
      metrics.RecordWeightsSwap(head, result);
    }
  }
  double seconds = 20e-6;
  for (const Metrics::Stage stage : kStages) {
    metrics.RecordStage(stage, seconds);
    seconds *= 1.7;
  }
  metrics.RecordReceived(Metrics::Transport::kTcp, 4 * kMib);
  metrics.RecordReceived(Metrics::Transport::kShm, 8 * kMib);
  metrics.RecordReceived(Metrics::Transport::kCudaIpc, 8 * kMib);
  metrics.RecordSent(Metrics::Transport::kTcp, 24'576);
  metrics.RecordSent(Metrics::Transport::kShm, 24'576);
  metrics.RecordSent(Metrics::Transport::kCudaIpc, 24'576);
  metrics.RecordRejection(Rejection::kQueueRows);
  metrics.SetTlsCertificateExpiry(absl::Now() + absl::Hours(24));
  metrics.RecordTlsReload(true);
  metrics.RecordTlsReload(false);
  metrics.RecordTlsRefusal(Metrics::TlsRefusal::kRevoked);
  metrics.RecordTlsRefusal(Metrics::TlsRefusal::kListExpired);
  metrics.RecordTlsRefusal(Metrics::TlsRefusal::kOther);
  {
    const testing::FullStderr full;  // so that the lines are lost
    LogError("a fixture");
    LogAudit(LogLevel::kInfo, {});
  }
  metrics.RecordCancelled(Metrics::LeftAt::kQueue);
  metrics.RecordDeadlineExceeded(Metrics::LeftAt::kEngine);
  // The GPU computes at 600 TFLOP/s for nine tenths of the time.
  constexpr double kBusySeconds = 0.9 * kStepMs / 1e3;
  for (const int gpu : {0, 1}) {
    metrics.RecordFlops(gpu, kBusySeconds * 600e12, kBusySeconds);
    metrics.RecordGpuError(gpu, "out_of_memory");
    metrics.RecordCollectiveError(gpu, "timeout");
    metrics.SetUnequalSums(gpu);
  }
}

int Run() {
  // Metrics uses CUDA's ordinals. The fake of the driver's library numbers the GPUs in reverse
  // order.
  Metrics metrics({.heads = {std::begin(kHeads), std::end(kHeads)},
                   .version = "1.2.3",
                   .commit = "a fixture",
                   .grpc = "1.51.1",
                   .gpus = {0, 1},
                   .gpu_pci_bus_ids = {{0, "0000:1a:00.0"}, {1, "0000:3b:00.0"}}});
  StatusBoard board(metrics, Clock::Steady());
  SetGauges(metrics);
  HttpServer::Options options;
  options.listen = "127.0.0.1:0";
  options.status_text = [] { return "a fixture\n"; };
  options.status_page = [&board] {
    ServerStatus status;
    status.version = "1.2.3";
    status.commit = "a fixture";
    status.state = ServingState::kDegraded;
    status.state_text = "ready, but 1 of 2 replicas has failed";
    status.memory = Memory();
    for (const char* const head : kHeads) {
      HeadStatus& added = status.heads.emplace_back();
      added.info = InfoOf(head, 3);
      added.state = status.state;
      added.state_text = status.state_text;
      added.is_replica_healthy = {true, false};
      added.queue_rows_max = 65'536;
    }
    status.warnings = {"a model may say <b>anything</b> & more"};
    return board.Page(status);
  };
  const auto server = HttpServer::Create(options, metrics);
  if (!server.ok()) {
    std::fprintf(stderr, "%s\n", server.status().ToString().c_str());
    return 1;
  }
  std::printf("http=127.0.0.1:%d\n", (*server)->port());
  std::fflush(stdout);
  pollfd input{STDIN_FILENO, POLLIN, 0};
  while (poll(&input, 1, kStepMs) == 0) {
    Work(metrics);
    board.Sample();
  }
  return 0;
}

}  // namespace
}  // namespace logprobd

int main() { return logprobd::Run(); }
