#include "server/engine/cpu_engine.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <new>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/cpu/cpu_isa.h"
#include "kernels/cpu/row_scorer.h"
#include "kernels/cpu/thread_pool.h"
#include "server/base/errors.h"
#include "server/engine/collective.h"
#include "server/engine/cpu_head.h"
#include "server/engine/cpu_shard.h"
#include "server/engine/layout.h"
#include "server/engine/sharded_engine.h"

namespace logprobd {
namespace {

constexpr absl::string_view kNamePrefix = "cpu/";

/// Returns the quota in /sys/fs/cgroup/cpu.max as a number of cores: "200000 100000" means 2 cores,
/// "max 100000" means infinity.
double QuotaCores() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0;
  double period = 0;
  if (file >> quota >> period && quota > 0 && period > 0) return quota / period;
  return std::numeric_limits<double>::infinity();
}

int32_t AffinityCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int32_t>(
      std::thread::hardware_concurrency());  // The machine has more than 1024 CPUs.
}

/// Returns the name of the instruction set as text for the log.
absl::string_view IsaText(kernels::CpuIsa isa) {
  switch (isa) {
    case kernels::CpuIsa::kGeneric:
      return "generic code";
    case kernels::CpuIsa::kAvx2:
      return "AVX2";
    case kernels::CpuIsa::kAvx512:
      return "AVX-512";
    case kernels::CpuIsa::kAvx512Bf16:
      return "AVX-512 bf16";
    case kernels::CpuIsa::kAmxBf16:
      return "AMX bf16";
  }
  return "generic code";
}

/// Returns the instruction set that scores a head of this dtype. Only bf16 heads use bf16
/// instructions.
kernels::CpuIsa IsaFor(Dtype head) {
  const kernels::CpuIsa best = kernels::BestCpuIsa();
  const bool is_for_bf16 =
      best == kernels::CpuIsa::kAvx512Bf16 || best == kernels::CpuIsa::kAmxBf16;
  return is_for_bf16 && head != Dtype::kBf16 ? kernels::CpuIsa::kAvx512 : best;
}

/// Returns the number of threads of all shards of all replicas together.
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

/// Returns the memory that one replica takes.
MemoryPlan ReplicaMemory(const HeadInfo& head, const kernels::RowScorer::Options& options,
                         absl::Span<const TileRange> tiles) {
  int64_t weight_bytes = 0;
  for (const TileRange& shard : tiles) weight_bytes += CpuHead::WeightBytes(head, shard);
  const int64_t workspace_bytes =
      kernels::RowScorer::WorkspaceBytes(CpuHead::Describe(head, tiles.front()), options);
  return {{.place = "host", .kind = "weights", .bytes = weight_bytes},
          {.place = "host",
           .kind = "workspace",
           .bytes = workspace_bytes * static_cast<int64_t>(tiles.size())}};
}

/// Reads every shard of a replica and creates its engine.
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
    LOGPROBD_RETURN_IF_ERROR(options.resources->TakeMemory(rank, "weight"));
    LOGPROBD_ASSIGN_OR_RETURN(CpuHead head,
                              CpuHead::Load(weights, range, NumThreads(options), meter));
    LOGPROBD_RETURN_IF_ERROR(options.resources->TakeMemory(rank, "workspace"));
    shards.push_back(std::make_unique<CpuShard>(rank, std::move(head), scorer, *options.resources));
  }
  ShardedEngineOptions engine = ReplicaOptions(weights.info(), plan, options, replica);
  engine.memory = ReplicaMemory(weights.info(), scorer, tiles);
  engine.tiles = tiles;
  std::unique_ptr<Collective> collective;
  if (tiles.size() > 1) {
    LOGPROBD_ASSIGN_OR_RETURN(
        collective, options.resources->TakeCollective(
                        std::make_unique<InProcessCollective>(static_cast<int32_t>(tiles.size()))));
  }
  return CreateShardedEngine(std::move(engine), std::move(shards), std::move(collective));
}

}  // namespace

int32_t UsableCpuCount() {
  const int32_t cores = std::max(AffinityCores(), 1);
  const double quota = std::ceil(QuotaCores());
  return quota < cores ? std::max(static_cast<int32_t>(quota), 1) : cores;
}

absl::StatusOr<EnginePlan> PlanCpuEngine(const HeadInfo& head, const EngineOptions& options,
                                         absl::string_view why_cpu) {
  LOGPROBD_ASSIGN_OR_RETURN(Layout layout, PlanCpuLayout(head, options));
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<TileRange> tiles,
                            PartitionTiles(head.vocab_size, layout.num_shards));
  const kernels::CpuIsa isa = IsaFor(head.dtype);
  const auto name = kernels::CpuIsaName(isa);
  EnginePlan plan;
  plan.device = Device::kCpu;
  plan.engine = absl::StrCat(kNamePrefix, absl::string_view(name.data(), name.size()));
  const int32_t num_threads = NumThreads(options);
  plan.reason =
      absl::StrCat(why_cpu, ", so the CPU engine scores with ", IsaText(isa), " on ", num_threads,
                   num_threads == 1 ? " thread" : " threads", "; ", layout.reason);
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
    return absl::InvalidArgumentError(absl::StrCat("there is no CPU engine named ", plan.engine));
  }
  if (!kernels::CpuIsaRuns(*isa)) {
    return absl::FailedPreconditionError(
        absl::StrCat(plan.engine, " needs instructions that this CPU does not have"));
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
    return absl::ResourceExhaustedError(
        "not enough host memory for the workspace of the CPU engine");
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the threads of the CPU engine cannot be started: ", error.what()));
  }
}

}  // namespace logprobd
