#include "server/app/plan.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/common/tile.h"
#include "server/base/device_name.h"
#include "server/base/human_bytes.h"
#include "server/base/scoring_engine.h"

namespace logprobd {
namespace {

void AppendLine(std::string& text, absl::string_view name, const std::string& value) {
  absl::StrAppendFormat(&text, "%-12s %s\n", name, value);
}

std::string NumberOrNone(float value, float none) {
  return value == none ? "none" : absl::StrCat(value);
}

void AppendLayout(std::string& text, const std::vector<ShardPlace>& layout) {
  for (const ShardPlace& place : layout) {
    const int64_t num_tiles = kernels::NumTiles(place.vocab_end - place.vocab_begin);
    AppendLine(text, "layout",
               absl::StrFormat("replica %d shard %d  %-5s  ids %d to %d (%d tile%s)", place.replica,
                               place.shard, place.device, place.vocab_begin, place.vocab_end,
                               num_tiles, num_tiles == 1 ? "" : "s"));
  }
}

void AppendMemory(std::string& text, const MemoryPlan& memory) {
  std::vector<std::string> places;
  for (const MemoryUse& use : memory) {
    if (std::find(places.begin(), places.end(), use.place) == places.end()) {
      places.push_back(use.place);
    }
  }
  for (const std::string& place : places) {
    for (const MemoryUse& use : memory) {
      if (use.place == place) {
        AppendLine(text, "memory",
                   absl::StrFormat("%-5s %-10s %10s%s", place, use.kind, HumanBytes(use.bytes),
                                   use.kind == "receive" ? "  (at most)" : ""));
      }
    }
    AppendLine(
        text, "memory",
        absl::StrFormat("%-5s %-10s %10s", place, "total", HumanBytes(TotalBytes(memory, place))));
  }
}

}  // namespace

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

absl::Duration BatchTimeMaxOf(const ServerOptions& options, Device device) {
  if (options.watchdog_s > 0) {
    return absl::Seconds(options.watchdog_s);
  }
  constexpr absl::Duration kOfGpus = absl::Seconds(120);
  return device == Device::kCuda ? kOfGpus : absl::InfiniteDuration();
}

Batcher::Options BatcherOptionsOf(const ServerOptions& options) {
  Batcher::Options result;
  result.batch_rows_max = options.batch_rows;
  result.batch_wait_max = absl::Microseconds(options.batch_wait_us);
  result.queue_rows_max = options.queue_rows;
  result.queue_bytes_max = options.queue_bytes;
  result.queue_requests_max = options.queue_requests;
  result.client_share_max = options.client_share;
  result.copy_threads = static_cast<int32_t>(options.copy_threads);
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
                         engine.num_replicas() * ScoringEngine::kBatchesInFlight *
                             Batcher::StagingBytes(options.batch_rows, head)});
  plan.memory.push_back({"host", "receive", options.receive_bytes});
  return plan;
}

std::vector<int> GpusOf(const std::vector<ShardPlace>& layout) {
  std::vector<int> gpus;
  for (const ShardPlace& place : layout) {
    const std::optional<int32_t> gpu = GpuOrdinal(place.device);
    if (gpu.has_value() && !absl::c_linear_search(gpus, *gpu)) {
      gpus.push_back(*gpu);
    }
  }
  return gpus;
}

int64_t TotalBytes(const MemoryPlan& plan, absl::string_view place) {
  int64_t total = 0;
  for (const MemoryUse& use : plan) {
    total += use.place == place ? use.bytes : 0;
  }
  return total;
}

std::string PlanText(const ServingPlan& plan) {
  const HeadInfo& head = plan.head;
  std::string text;
  AppendLine(text, "head", head.name);
  AppendLine(text, "model type", head.model_type);
  AppendLine(text, "tensor", absl::StrCat(head.tensor, head.tied ? " (tied)" : ""));
  AppendLine(text, "version", absl::StrCat(head.weights_version));
  AppendLine(text, "hidden", absl::StrCat(head.hidden_size));
  AppendLine(text, "vocabulary",
             absl::StrCat(head.vocab_rows, " rows, ", head.vocab_size, " valid"));
  AppendLine(text, "scale", NumberOrNone(head.scale, 1));
  AppendLine(text, "cap", NumberOrNone(head.softcap, 0));
  AppendLine(text, "bias", head.has_bias ? "yes" : "none");
  AppendLine(text, "dtype", std::string(DtypeName(head.dtype)));
  AppendLine(text, "weight",
             absl::StrCat(HumanBytes(head.weight_bytes), " (", head.weight_bytes, " bytes)"));
  AppendLine(text, "engine", absl::StrCat(plan.engine.engine, ": ", plan.engine.reason));
  AppendLayout(text, plan.engine.layout);
  AppendMemory(text, plan.memory);
  for (const std::string& warning : plan.warnings) {
    AppendLine(text, "warning", warning);
  }
  return text;
}

}  // namespace logprobd
