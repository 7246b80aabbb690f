#include "server/engine/cuda_engine.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/thread_pool.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "server/engine/cuda_plan.h"
#include "server/engine/cuda_shard.h"
#include "server/engine/cuda_slot.h"
#include "server/engine/cuda_status.h"
#include "server/engine/load_meter.h"
#include "server/engine/nccl_collective.h"
#include "server/engine/peer_collective.h"
#include "server/engine/sharded_engine.h"
#include "server/engine/vocab_partition.h"

namespace logprobd {
namespace {

static_assert(kernels::kChunkSlots == ScoringEngine::kBatchesInFlight);

/// Kernels that wait for a peer leave within microseconds of being told, others when they have
/// ended; one that hangs stays.
constexpr absl::Duration kRestTime = absl::Seconds(5);

/// Waking the submit thread takes some 50 us of a small batch's time, looking takes a core for as
/// long. As long as the batch thread looks for a request: where that is awake this one is too.
constexpr absl::Duration kBusyPollBatch = absl::Microseconds(500);

/// A replica that is being made: its shards load at the same time as all others.
struct Replica {
  std::vector<int32_t> gpus;
  std::vector<std::shared_ptr<PinnedBuffer>> host_slots;
  std::vector<std::unique_ptr<CudaShard>> shards;
};

absl::StatusOr<std::unique_ptr<Collective>> Connect(absl::Span<const int32_t> gpus,
                                                    const EnginePlan& plan,
                                                    const EngineOptions& options) {
  if (gpus.size() == 1) return nullptr;
  LOGPROBD_RETURN_IF_ERROR(EnablePeerAccess(gpus));  // hidden rows travel between GPUs in any case
  std::unique_ptr<Collective> collective;
  if (plan.exchange == Exchange::kNccl) {
    LOGPROBD_ASSIGN_OR_RETURN(collective, CreateNcclCollective(gpus));
  } else {
    LOGPROBD_ASSIGN_OR_RETURN(collective, CreatePeerCollective(gpus));
  }
  return options.faults.Wrap(std::move(collective));
}

/// The shards of a replica one after the other; replicas at the same time.
absl::Status WarmUp(std::vector<Replica>& replicas, const HeadInfo& info) {
  std::vector<absl::Status> statuses(replicas.size());
  kernels::ThreadPool threads(static_cast<int32_t>(replicas.size()));
  threads.ForEach(static_cast<int64_t>(replicas.size()), [&](int64_t index, int32_t /*thread*/) {
    const auto i = static_cast<size_t>(index);
    for (const std::unique_ptr<CudaShard>& shard : replicas[i].shards) {
      if (statuses[i].ok()) statuses[i] = shard->WarmUp(info);
    }
  });
  for (const absl::Status& status : statuses) LOGPROBD_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateEngine(const HeadInfo& info,
                                                            const EnginePlan& plan,
                                                            const EngineOptions& options,
                                                            int32_t index, Replica replica,
                                                            std::vector<TileRange> tiles) {
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<Collective> collective,
                            Connect(replica.gpus, plan, options));
  if (replica.shards.size() > 1) {
    std::vector<const CudaShard*> peers;
    for (const std::unique_ptr<CudaShard>& shard : replica.shards) peers.push_back(shard.get());
    for (const std::unique_ptr<CudaShard>& shard : replica.shards) shard->SetPeers(peers);
  }
  const CudaShard& first = *replica.shards.front();
  LogInfo("CUDA engine ready to score",
          {{"replica", index},
           {"gpu", first.gpu()},
           {"shards", static_cast<int64_t>(replica.shards.size())},
           {"exchange", collective == nullptr ? "none" : collective->name()},
           {"gemm", first.scorer().algorithm()},
           {"fused", first.plan().with_fused},
           {"block_rows", first.plan().block_rows},
           {"workspace_bytes", first.plan().workspace_bytes}});
  ShardedEngineOptions engine = ReplicaOptions(info, plan, options, index);
  engine.memory = ReplicaMemory(info, options, plan.exchange, replica.gpus, tiles);
  engine.rest_time_max = kRestTime;
  engine.busy_poll = kBusyPollBatch;
  engine.tiles = std::move(tiles);
  engine.gpus = replica.gpus;
  std::vector<std::unique_ptr<EngineShard>> shards;
  for (std::unique_ptr<CudaShard>& shard : replica.shards) shards.push_back(std::move(shard));
  return CreateShardedEngine(std::move(engine), std::move(shards), std::move(collective));
}

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateCudaEngines(
    const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options) {
  const HeadInfo& info = weights.info();
  const int32_t num_shards = plan.num_shards();
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<TileRange> tiles,
                            PartitionTiles(info.vocab_size, num_shards));
  std::vector<Replica> replicas(static_cast<size_t>(plan.num_replicas()));
  for (size_t i = 0; i < replicas.size(); ++i) {
    Replica& replica = replicas[i];
    replica.gpus = GpusOf(plan, static_cast<int32_t>(i));
    replica.shards.resize(replica.gpus.size());
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(replica.gpus.front()));
    for (int slot = 0; slot < ScoringEngine::kBatchesInFlight; ++slot) {
      LOGPROBD_ASSIGN_OR_RETURN(
          replica.host_slots.emplace_back(),
          CudaSlot::CreateHostSide(
              ChunkPlanOf(info, options, replica.gpus.front(), num_shards, tiles.front())));
    }
  }
  LoadMeter meter(plan.num_replicas() * info.vocab_size * info.hidden_size * DtypeBytes(info.dtype),
                  options.progress);
  kernels::ThreadPool loaders(static_cast<int32_t>(plan.layout.size()));
  loaders.ForEach(static_cast<int64_t>(plan.layout.size()), [&](int64_t place, int32_t /*thread*/) {
    const ShardPlace& where = plan.layout[static_cast<size_t>(place)];
    const auto rank = static_cast<size_t>(where.shard);
    Replica& replica = replicas[static_cast<size_t>(where.replica)];
    CudaShard::Options shard;
    shard.rank = where.shard;
    shard.gpu = replica.gpus[rank];
    shard.plan = ChunkPlanOf(info, options, shard.gpu, num_shards, tiles[rank]);
    shard.host_slots = replica.host_slots;
    shard.faults = options.faults;
    auto made = CudaShard::Create(weights, std::move(shard), meter);
    if (made.ok()) replica.shards[rank] = *std::move(made);
  });
  LOGPROBD_RETURN_IF_ERROR(meter.status());
  LOGPROBD_RETURN_IF_ERROR(WarmUp(replicas, info));
  std::vector<std::unique_ptr<ScoringEngine>> engines;
  for (size_t i = 0; i < replicas.size(); ++i) {
    LOGPROBD_ASSIGN_OR_RETURN(
        engines.emplace_back(),
        CreateEngine(info, plan, options, static_cast<int32_t>(i), std::move(replicas[i]), tiles));
  }
  return engines;
}

}  // namespace logprobd
