#include "server/app/plan.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/base/errors.h"
#include "server/base/head_info.h"
#include "server/base/scoring_engine.h"
#include "server/base/text.h"

namespace logprobd {
ModelFolderOptions ModelOptionsOf(const ServerOptions& options) {
  ModelFolderOptions result;
  result.head_name = options.head_name;
  result.head_tensor = options.head_tensor;
  if (options.valid_vocab > 0) {
    result.valid_vocab = options.valid_vocab;
  }
  result.include_padding = options.include_padding;
  result.weights_version = static_cast<uint64_t>(options.weights_version);
  return result;
}

EngineOptions EngineOptionsOf(const ServerOptions& options) {
  EngineOptions result;
  result.device = options.device == "cpu"    ? Device::kCpu
                  : options.device == "cuda" ? Device::kCuda
                                             : Device::kAuto;
  result.kernel = options.kernel == "fused"     ? GpuKernel::kFused
                  : options.kernel == "chunked" ? GpuKernel::kChunked
                                                : GpuKernel::kAuto;
  result.batch_rows_max = options.batch_rows;
  result.top_k_max = static_cast<int32_t>(options.top_k_max);
  result.cpu_threads = static_cast<int32_t>(options.cpu_threads);
  result.gpus = options.gpus;
  result.shards = static_cast<int32_t>(options.shards);
  result.replicas = static_cast<int32_t>(options.replicas);
  result.exchange = options.exchange == "peer"   ? Exchange::kPeer
                    : options.exchange == "nccl" ? Exchange::kNccl
                                                 : Exchange::kAuto;
  return result;
}

absl::StatusOr<std::shared_ptr<const AllowedRoots>> WeightsRootsOf(const ServerOptions& options) {
  if (options.weights_root == "none") {
    return nullptr;
  }
  if (!options.weights_root.empty()) {
    absl::StatusOr<AllowedRoots> roots =
        AllowedRoots::Create(absl::StrSplit(options.weights_root, ',', absl::SkipWhitespace()));
    LOGPROBD_RETURN_IF_ERROR(WithContext(roots.status(), "--weights-root"));
    return std::make_shared<const AllowedRoots>(*std::move(roots));
  }
  std::error_code error;
  const std::filesystem::path model = std::filesystem::canonical(options.model, error);
  const std::filesystem::path parent = model.parent_path();
  absl::StatusOr<AllowedRoots> roots =
      AllowedRoots::Create({(parent == parent.root_path() ? model : parent).string()});
  if (error || !roots.ok()) {
    return nullptr;  // opening the model says what is wrong
  }
  return std::make_shared<const AllowedRoots>(*std::move(roots));
}

int NumStagingBuffers(const ServerOptions& options) {
  const bool is_swappable = !options.admin.empty() && options.weights_root != "none";
  return ScoringEngine::kBatchesInFlight * (is_swappable ? 2 : 1);
}

absl::Duration BatchTimeMaxOf(const ServerOptions& options, Device device) {
  if (options.watchdog_s > 0) {
    return absl::Seconds(options.watchdog_s);
  }
  constexpr absl::Duration kOfGpus = absl::Seconds(120);
  return device == Device::kCuda ? kOfGpus : absl::InfiniteDuration();
}

/// An answer takes some 25 us to send, a batch may hold dozens, and the engine's next one waits for
/// the thread that sends them.
constexpr int32_t kAnswerThreads = 3;

Batcher::Options BatcherOptionsOf(const ServerOptions& options) {
  Batcher::Options result;
  result.batch_rows_max = options.batch_rows;
  result.batch_wait_max = absl::Microseconds(options.batch_wait_us);
  result.queue_rows_max = options.queue_rows;
  result.queue_bytes_max = options.queue_bytes;
  result.queue_requests_max = options.queue_requests;
  result.client_share_max = options.client_share;
  result.copy_threads = static_cast<int32_t>(options.copy_threads);
  result.answer_threads = kAnswerThreads;
  result.head = options.head_name;
  return result;
}

RequestLimits LimitsOf(const ServerOptions& options) {
  const QueueLoad client = Batcher::ClientLimits(BatcherOptionsOf(options));
  RequestLimits limits;
  limits.request_rows_max = std::min(options.request_rows, client.rows);
  limits.message_bytes_max = std::min(options.max_message_bytes, client.bytes);
  limits.top_k_max = static_cast<int32_t>(options.top_k_max);
  limits.candidates_max = options.candidates_max;
  limits.segments_max = options.segments_max;
  limits.stream_window = static_cast<int32_t>(options.stream_window);
  return limits;
}

ServingPlan MakeServingPlan(const ServerOptions& options, const HeadInfo& head,
                            const EnginePlan& engine, const std::vector<std::string>& warnings) {
  ServingPlan plan;
  plan.head = head;
  plan.head.engine = engine.engine;
  plan.head.engine_reason = engine.reason;
  plan.head.layout = engine.layout;
  plan.head.limits = LimitsOf(options);
  plan.engine = engine;
  plan.warnings = warnings;
  plan.memory = engine.memory;
  plan.memory.push_back({"host", "staging",
                         engine.num_replicas() * NumStagingBuffers(options) *
                             Batcher::StagingBytes(options.batch_rows, head)});
  return plan;
}

MemoryPlan ServerPlan::memory() const {
  MemoryPlan sum;
  for (const ServingPlan& head : heads) {
    for (const MemoryUse& use : head.memory) {
      AddMemory(sum, use);
    }
  }
  sum.push_back({"host", "receive", receive_bytes});
  sum.push_back({"host", "shared", shared_bytes});
  return sum;
}

int64_t SharedMemoryBytesMax(const ServerOptions& options) {
  return options.local.empty() ? 0 : options.shared_memory_bytes;
}

absl::StatusOr<ServerPlan> MakeServerPlan(const ServerOptions& options,
                                          std::vector<ServingPlan> heads,
                                          const HostMemorySize& host) {
  ServerPlan plan;
  plan.heads = std::move(heads);
  int64_t reserved = 0;
  for (const ServingPlan& head : plan.heads) {
    reserved += TotalBytes(head.memory, "host");
    for (const MemoryUse& free : head.engine.there) {
      if (TotalBytes(plan.there, free.place) == 0) {
        plan.there.push_back(free);
      }
    }
  }
  plan.receive_bytes = options.receive_bytes;
  plan.shared_bytes = SharedMemoryBytesMax(options);
  if (host.available_bytes > 0) {
    plan.there.push_back({"host", "there", host.available_bytes});
  }
  const std::string whose = plan.heads.size() == 1 ? "the head" : "all heads together";
  const std::string advice =
      plan.heads.size() == 1 ? "lower --batch-rows" : "lower --batch-rows or serve fewer heads";
  if (host.total_bytes > 0 && reserved > host.total_bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("host memory: ", whose, " reserve", plan.heads.size() == 1 ? "s " : " ",
                     HumanBytes(reserved), ", but the process can have ",
                     HumanBytes(host.total_bytes), ": ", advice));
  }
  if (host.available_bytes > 0 && reserved > host.available_bytes) {
    plan.heads.back().warnings.push_back(
        absl::StrCat("host memory: ", HumanBytes(reserved), " are to be reserved for ", whose,
                     ", but only ", HumanBytes(host.available_bytes), " are available now"));
  }
  return plan;
}

std::map<int, std::string> PciBusIdsOf(const ServerPlan& plan) {
  std::map<int, std::string> ids;
  for (const ServingPlan& head : plan.heads) {
    ids.insert(head.engine.gpu_pci_bus_ids.begin(), head.engine.gpu_pci_bus_ids.end());
  }
  return ids;
}

std::vector<int32_t> GpusOf(const ServerPlan& plan) {
  std::vector<ShardPlace> places;
  for (const ServingPlan& head : plan.heads) {
    places.insert(places.end(), head.engine.layout.begin(), head.engine.layout.end());
  }
  return GpusOf(places);
}

void AddMemory(MemoryPlan& sum, const MemoryUse& use) {
  for (MemoryUse& other : sum) {
    if (other.place == use.place && other.kind == use.kind && other.is_pinned == use.is_pinned) {
      other.bytes += use.bytes;
      return;
    }
  }
  sum.push_back(use);
}

int64_t TotalBytes(const MemoryPlan& plan, absl::string_view place) {
  int64_t total = 0;
  for (const MemoryUse& use : plan) {
    total += use.place == place ? use.bytes : 0;
  }
  return total;
}

}  // namespace logprobd
