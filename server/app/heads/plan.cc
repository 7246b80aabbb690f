#include "server/app/heads/plan.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/common/tile.h"
#include "server/app/options/flags.h"
#include "server/app/options/part_options.h"
#include "server/base/errors.h"
#include "server/base/head_info.h"
#include "server/base/text.h"
#include "server/batching/batcher.h"
#include "server/weights/hub_cache.h"

namespace logprobd {
namespace {

/// Plans the next head, and replaces the model's id in `options` by its path. `reserved` is the
/// memory that the heads before it will take.
absl::Status PlanNext(ServerOptions& options, const ServerParts& parts, const MemoryPlan& reserved,
                      PlannedHeads& planned) {
  LOGPROBD_ASSIGN_OR_RETURN(options.model, FindModel(options.model, HubCacheFolder()));
  LOGPROBD_ASSIGN_OR_RETURN(ModelFolderHead found,
                            parts.open_model(options.model, ModelOptionsOf(options)));
  EngineOptions engine_options = EngineOptionsOf(options);
  engine_options.reserved = reserved;
  const absl::StatusOr<EnginePlan> engine =
      parts.plan_engine(found.weights->info(), engine_options);
  LOGPROBD_RETURN_IF_ERROR(WithContext(
      engine.status(), absl::StrCat("--device ", ChoiceText(*FindFlag("device"), options))));
  planned.plan.heads.push_back(
      MakeServingPlan(options, found.weights->info(), *engine, found.warnings));
  planned.weights.push_back(std::move(found.weights));
  LOGPROBD_ASSIGN_OR_RETURN(planned.roots.emplace_back(), WeightsRootsOf(options));
  return absl::OkStatus();
}

std::vector<DeviceTurns::Lane> LanesOf(const EnginePlan& plan) {
  std::vector<DeviceTurns::Lane> lanes(static_cast<size_t>(plan.num_replicas()));
  for (DeviceTurns::Lane& lane : lanes) lane.waits_for_peers = WaitsForPeers(plan.layout);
  for (const ShardPlace& place : plan.layout) {
    std::vector<std::string>& devices = lanes[static_cast<size_t>(place.replica)].devices;
    if (!absl::c_linear_search(devices, place.device)) devices.push_back(place.device);
  }
  return lanes;
}

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

/// Returns "  of 139.0 GiB free", or an empty string if the free memory is not known.
std::string AvailableText(const MemoryPlan& available, absl::string_view place) {
  const int64_t bytes = TotalBytes(available, place);
  return bytes == 0 ? "" : absl::StrCat("  of ", HumanBytes(bytes), " free");
}

void AppendMemory(std::string& text, const MemoryPlan& memory, const MemoryPlan& available) {
  std::vector<std::string> places;
  for (const MemoryUse& use : memory) {
    if (std::find(places.begin(), places.end(), use.place) == places.end()) {
      places.push_back(use.place);
    }
  }
  for (const std::string& place : places) {
    for (const MemoryUse& use : memory) {
      if (use.place == place) {
        AppendLine(
            text, "memory",
            absl::StrFormat("%-5s %-10s %10s%s", place, use.kind, HumanBytes(use.bytes),
                            use.kind == "receive" || use.kind == "shared" ? "  (at most)" : ""));
      }
    }
    AppendLine(
        text, "memory",
        absl::StrFormat("%-5s %-10s %10s%s", place, "total", HumanBytes(TotalBytes(memory, place)),
                        AvailableText(available, place)));
  }
}

/// Appends everything about a head except its memory and warnings.
void AppendHead(std::string& text, const ServingPlan& plan) {
  const HeadInfo& head = plan.head;
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
}

void AppendWarnings(std::string& text, const ServingPlan& plan) {
  for (const std::string& warning : plan.warnings) AppendLine(text, "warning", warning);
}

}  // namespace

absl::StatusOr<PlannedHeads> PlanHeads(const ServerOptions& options, const ServerParts& parts) {
  PlannedHeads planned;
  planned.options = HeadOptions(options);
  MemoryPlan reserved;
  for (ServerOptions& head : planned.options) {
    const absl::Status status = PlanNext(head, parts, reserved, planned);
    if (!status.ok()) {
      return planned.options.size() == 1
                 ? status
                 : WithContext(status, absl::StrCat("head \"", head.head_name, "\""));
    }
    AddMemory(reserved, planned.plan.heads.back().memory);
  }
  LOGPROBD_ASSIGN_OR_RETURN(
      planned.plan, MakeServerPlan(options, std::move(planned.plan.heads), parts.host_memory()));
  return planned;
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
  for (const ServingPlan& head : heads) AddMemory(sum, head.memory);
  sum.push_back({"host", "receive", receive_bytes});
  sum.push_back({"host", "shared", shared_bytes});
  return sum;
}

absl::StatusOr<ServerPlan> MakeServerPlan(const ServerOptions& options,
                                          std::vector<ServingPlan> heads,
                                          const HostMemorySize& host) {
  ServerPlan plan;
  plan.heads = std::move(heads);
  int64_t reserved = 0;
  for (const ServingPlan& head : plan.heads) {
    reserved += TotalBytes(head.memory, "host");
    for (const MemoryUse& free : head.engine.available) {
      if (TotalBytes(plan.available, free.place) == 0) plan.available.push_back(free);
    }
  }
  // Each gRPC listener has a quota of its own, so that clients cannot take up that of operators.
  plan.receive_bytes = (options.admin.empty() ? 1 : 2) * options.receive_bytes;
  plan.shared_bytes = SharedMemoryBytesMax(options);
  if (host.available_bytes > 0) {
    plan.available.push_back({"host", "available", host.available_bytes});
  }
  const std::string owner = plan.heads.size() == 1 ? "the head" : "all heads together";
  const std::string advice =
      plan.heads.size() == 1 ? "lower --batch-rows" : "lower --batch-rows or serve fewer heads";
  if (host.total_bytes > 0 && reserved > host.total_bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("host memory: ", owner, " reserve", plan.heads.size() == 1 ? "s " : " ",
                     HumanBytes(reserved), ", but the process can have at most ",
                     HumanBytes(host.total_bytes), ": ", advice));
  }
  if (host.available_bytes > 0 && reserved > host.available_bytes) {
    plan.heads.back().warnings.push_back(
        absl::StrCat("host memory: ", owner, " will reserve ", HumanBytes(reserved), ", but only ",
                     HumanBytes(host.available_bytes), " are available now"));
  }
  return plan;
}

std::vector<DeviceTurns::Head> TurnHeadsOf(const ServerPlan& plan) {
  std::vector<DeviceTurns::Head> heads;
  std::map<std::string, size_t> first_head;  // index of the first head on a device
  bool is_any_shared = false;
  for (const ServingPlan& serving : plan.heads) {
    for (const ShardPlace& place : serving.engine.layout) {
      const auto [first, is_new] = first_head.emplace(place.device, heads.size());
      is_any_shared = is_any_shared || first->second != heads.size();
    }
    heads.push_back({.lanes = LanesOf(serving.engine),
                     .row_cost = static_cast<double>(serving.head.vocab_size) *
                                 static_cast<double>(serving.head.hidden_size)});
  }
  return is_any_shared ? heads : std::vector<DeviceTurns::Head>();
}

bool AnyWaitsForPeers(const std::vector<DeviceTurns::Head>& heads) {
  return absl::c_any_of(heads, [](const DeviceTurns::Head& head) {
    return absl::c_any_of(head.lanes,
                          [](const DeviceTurns::Lane& lane) { return lane.waits_for_peers; });
  });
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

void AddMemory(MemoryPlan& sum, const MemoryPlan& plan) {
  for (const MemoryUse& use : plan) AddMemory(sum, use);
}

int64_t TotalBytes(const MemoryPlan& plan, absl::string_view place) {
  int64_t total = 0;
  for (const MemoryUse& use : plan) total += use.place == place ? use.bytes : 0;
  return total;
}

std::string PlanText(const ServerPlan& plan) {
  std::string text;
  if (plan.heads.size() == 1) {
    AppendHead(text, plan.heads.front());
    AppendMemory(text, plan.memory(), plan.available);
    AppendWarnings(text, plan.heads.front());
    return text;
  }
  for (const ServingPlan& head : plan.heads) {
    AppendHead(text, head);
    AppendMemory(text, head.memory, {});
    AppendWarnings(text, head);
    text.push_back('\n');
  }
  AppendLine(text, "all heads",
             absl::StrJoin(plan.heads, ", ", [](std::string* out, const ServingPlan& head) {
               out->append(head.head.name);
             }));
  AppendMemory(text, plan.memory(), plan.available);
  return text;
}

}  // namespace logprobd
