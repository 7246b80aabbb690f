#include "server/engine/cpu_engine.h"

#include <algorithm>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/cpu/cpu_isa.h"
#include "kernels/cpu/row_scorer.h"
#include "kernels/cpu/thread_pool.h"
#include "server/base/errors.h"
#include "server/engine/cpu_count.h"
#include "server/engine/cpu_head.h"
#include "server/engine/cpu_shard.h"
#include "server/engine/in_process_collective.h"
#include "server/engine/layout.h"
#include "server/engine/sharded_engine.h"
#include "server/engine/vocab_partition.h"

namespace logprobd {
namespace {

constexpr absl::string_view kNamePrefix = "cpu/";

/// Of all shards of all replicas.
int32_t NumThreads(const EngineOptions& options) {
  return options.cpu_threads > 0 ? options.cpu_threads : UsableCpuCount();
}

kernels::RowScorer::Options ScorerOptions(kernels::CpuIsa isa, const EngineOptions& options,
                                          int32_t num_engine_shards,
                                          absl::Span<const TileRange> tiles) {
  const auto num_shards = static_cast<int32_t>(tiles.size());
  return {.isa = isa,
          .num_threads = std::max(NumThreads(options) / num_engine_shards, 1),
          .batch_rows_max = options.batch_rows_max,
          .top_k_max = options.top_k_max,
          .num_shards = num_shards,
          .num_tiles_max = tiles.front().size()};
}

/// Memory of one replica.
MemoryPlan ReplicaMemory(const HeadInfo& head, const kernels::RowScorer::Options& options,
                         absl::Span<const TileRange> tiles) {
  int64_t weight_bytes = 0;
  for (const TileRange& shard : tiles) weight_bytes += CpuHead::WeightBytes(head, shard);
  const int64_t workspace_bytes =
      kernels::RowScorer::WorkspaceBytes(CpuHead::Facts(head, tiles.front()), options);
  return {{.place = "host", .kind = "weights", .bytes = weight_bytes},
          {.place = "host",
           .kind = "workspace",
           .bytes = workspace_bytes * static_cast<int64_t>(tiles.size())}};
}

/// Reads every shard of a replica and makes its engine.
absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateReplica(const HeadWeights& weights,
                                                             const EnginePlan& plan,
                                                             const EngineOptions& options,
                                                             kernels::CpuIsa isa, int32_t replica,
                                                             LoadMeter& meter) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<TileRange> tiles,
                            PartitionTiles(weights.info().vocab_size, plan.num_shards()));
  const kernels::RowScorer::Options scorer =
      ScorerOptions(isa, options, plan.num_replicas() * plan.num_shards(), tiles);
  std::vector<std::unique_ptr<EngineShard>> shards;
  for (const TileRange& range : tiles) {
    const auto rank = static_cast<int32_t>(shards.size());
    LOGPROBD_RETURN_IF_ERROR(options.faults.CheckMemory(rank, "weight"));
    LOGPROBD_ASSIGN_OR_RETURN(CpuHead head,
                              CpuHead::Load(weights, range, NumThreads(options), meter));
    LOGPROBD_RETURN_IF_ERROR(options.faults.CheckMemory(rank, "workspace"));
    shards.push_back(std::make_unique<CpuShard>(rank, std::move(head), scorer, options.faults));
  }
  ShardedEngineOptions engine = ReplicaOptions(weights.info(), plan, options, replica);
  engine.memory = ReplicaMemory(weights.info(), scorer, tiles);
  engine.tiles = tiles;
  std::unique_ptr<Collective> collective;
  if (tiles.size() > 1) {
    LOGPROBD_ASSIGN_OR_RETURN(collective, options.faults.Wrap(std::make_unique<InProcessCollective>(
                                              static_cast<int32_t>(tiles.size()))));
  }
  return CreateShardedEngine(std::move(engine), std::move(shards), std::move(collective));
}

}  // namespace

absl::StatusOr<EnginePlan> PlanCpuEngine(const HeadInfo& head, const EngineOptions& options,
                                         std::string reason) {
  LOGPROBD_ASSIGN_OR_RETURN(Layout layout, PlanCpuLayout(head, options));
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<TileRange> tiles,
                            PartitionTiles(head.vocab_size, layout.num_shards));
  const kernels::CpuIsa isa = kernels::BestCpuIsa();
  const auto name = kernels::CpuIsaName(isa);
  EnginePlan plan;
  plan.device = Device::kCpu;
  plan.engine = absl::StrCat(kNamePrefix, absl::string_view(name.data(), name.size()));
  plan.reason = std::move(reason);
  absl::StrAppend(&plan.reason, "; ", NumThreads(options), " threads");
  if (!layout.reason.empty()) absl::StrAppend(&plan.reason, "; ", layout.reason);
  plan.layout = std::move(layout.places);
  plan.memory = ReplicaMemory(
      head, ScorerOptions(isa, options, layout.num_replicas * layout.num_shards, tiles), tiles);
  for (MemoryUse& use : plan.memory) use.bytes *= layout.num_replicas;
  return plan;
}

absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateCpuEngines(
    const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options) {
  const absl::string_view name = absl::StripPrefix(plan.engine, kNamePrefix);
  const std::optional<kernels::CpuIsa> isa = kernels::CpuIsaByName({name.data(), name.size()});
  if (!isa.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("no CPU engine is called ", plan.engine));
  }
  if (!kernels::CpuIsaRuns(*isa)) {
    return absl::FailedPreconditionError(
        absl::StrCat("engine ", plan.engine, ": this CPU does not have these instructions"));
  }
  const HeadInfo& info = weights.info();
  LoadMeter meter(plan.num_replicas() * info.vocab_size * info.hidden_size * DtypeBytes(info.dtype),
                  options.progress);
  std::vector<std::unique_ptr<ScoringEngine>> engines;
  try {
    for (int32_t replica = 0; replica < plan.num_replicas(); ++replica) {
      LOGPROBD_ASSIGN_OR_RETURN(engines.emplace_back(),
                                CreateReplica(weights, plan, options, *isa, replica, meter));
    }
    return engines;
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("no host memory for the CPU engine's workspace");
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the CPU engine's threads cannot be started: ", error.what()));
  }
}

}  // namespace logprobd
