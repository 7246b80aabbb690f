#include "server/engine/cuda_engine.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/chunked/logit_chunk.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/params.h"
#include "server/base/errors.h"
#include "server/base/head_info.h"
#include "server/base/log.h"
#include "server/engine/cublas_lt_library.h"
#include "server/engine/cuda_equal_sums.h"
#include "server/engine/cuda_head.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/cuda_shard.h"
#include "server/engine/cuda_slot.h"
#include "server/engine/kernel_params.h"
#include "server/engine/layout.h"
#include "server/engine/load_meter.h"
#include "server/engine/nccl_collective.h"
#include "server/engine/peer_collective.h"
#include "server/engine/sharded_engine.h"
#include "server/engine/workspace_plan.h"

namespace logprobd {
namespace {

static_assert(kTopKMax == kernels::kTopKMax);

constexpr int32_t kComputeCapabilityMin = 8;

/// Estimated device memory of an NCCL communicator; NCCL 2.28 took 90 to 122 MiB on two H200s.
constexpr int64_t kNcclBytes = int64_t{96} << 20;

/// Longest wait for the work of a replica that has failed. Kernels that wait for a peer end within
/// microseconds of an abort, and other kernels end when they are done; a kernel that hangs never
/// ends.
constexpr absl::Duration kRestTime = absl::Seconds(5);

/// Time for which the submit thread polls for a batch before it sleeps. Waking it adds about 50 us
/// to a small batch; polling occupies a core. The batch thread polls for requests for the same
/// time, so both threads are awake at the same time.
constexpr absl::Duration kBusyPollBatch = absl::Microseconds(500);

/// The reason why no GPU can be used, as a clause, and what to do about it. Both are empty if a GPU
/// can be used.
struct Obstacle {
  std::string why;
  std::string advice;

  absl::Status ToStatus() const {
    return why.empty() ? absl::OkStatus()
                       : absl::FailedPreconditionError(absl::StrCat(why, "; ", advice));
  }
};

/// Converts an error of the first CUDA calls into an Obstacle.
Obstacle NoGpu(cudaError_t error) {
  (void)cudaGetLastError();
  int driver_version = 0;
  const bool has_driver =
      cudaDriverGetVersion(&driver_version) == cudaSuccess && driver_version > 0;
  const bool is_visible = has_driver && error != cudaErrorNoDevice;
  return {
      is_visible ? absl::StrCat("CUDA cannot be used: ", cudaGetErrorString(error))
                 : "no NVIDIA GPU is visible",
      absl::StrCat("install the NVIDIA driver (for CUDA 13: 580 or later) or use --device cpu (",
                   cudaGetErrorName(error), ")")};
}

std::string Describe(const GpuInfo& gpu) {
  return absl::StrCat(gpu.name, ", compute capability ", gpu.major, ".", gpu.minor);
}

/// The GPUs of the machine, or the reason why there are none. All of their memory counts as free
/// until MeasureGpus measures it.
struct FoundGpus {
  std::vector<GpuInfo> gpus;
  Obstacle obstacle;
};

FoundGpus FindGpus() {
  int num_gpus = 0;
  cudaError_t error = cudaGetDeviceCount(&num_gpus);
  if (error == cudaSuccess && num_gpus == 0) error = cudaErrorNoDevice;
  FoundGpus found;
  for (int gpu = 0; error == cudaSuccess && gpu < num_gpus; ++gpu) {
    cudaDeviceProp properties{};
    error = cudaGetDeviceProperties(&properties, gpu);
    GpuInfo info;
    info.ordinal = gpu;
    info.name = properties.name;
    info.pci_bus_id = absl::StrCat(absl::Hex(properties.pciDomainID, absl::kZeroPad4), ":",
                                   absl::Hex(properties.pciBusID, absl::kZeroPad2), ":",
                                   absl::Hex(properties.pciDeviceID, absl::kZeroPad2), ".0");
    info.major = properties.major;
    info.minor = properties.minor;
    info.total_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    // A GPU that is too old is never measured.
    info.free_bytes = info.major < kComputeCapabilityMin ? 0 : info.total_bytes;
    found.gpus.push_back(std::move(info));
  }
  if (error != cudaSuccess) return {.gpus = {}, .obstacle = NoGpu(error)};
  return found;
}

/// Returns the reason why no GPU of this machine can be used; empty if one can be used.
Obstacle FindObstacle() {
  const FoundGpus found = FindGpus();
  if (found.gpus.empty()) return found.obstacle;
  if (absl::c_any_of(found.gpus,
                     [](const GpuInfo& gpu) { return gpu.major >= kComputeCapabilityMin; })) {
    return {};
  }
  return {absl::StrCat("GPU 0 (", Describe(found.gpus.front()),
                       ") is older than compute capability ", kComputeCapabilityMin, ".0"),
          "use --device cpu"};
}

/// Measures the free memory of the GPUs that may be used, and checks that cuBLASLt can be loaded
/// and that this build has code for them. This creates a CUDA context on each of these GPUs.
absl::Status MeasureGpus(const EngineOptions& options, std::vector<GpuInfo>& gpus) {
  LOGPROBD_RETURN_IF_ERROR(LoadCublasLt());
  for (GpuInfo& gpu : gpus) {
    const bool is_named =
        std::find(options.gpus.begin(), options.gpus.end(), gpu.ordinal) != options.gpus.end();
    if ((!options.gpus.empty() && !is_named) || gpu.major < kComputeCapabilityMin) continue;
    cudaError_t error = cudaSetDevice(gpu.ordinal);
    if (error == cudaSuccess) error = kernels::ProbeTileStats();
    if (error == cudaErrorNoKernelImageForDevice) {
      (void)cudaGetLastError();
      return absl::FailedPreconditionError(
          absl::StrCat("this build has no code for GPU ", gpu.ordinal, " (", Describe(gpu),
                       "): build with -DCMAKE_CUDA_ARCHITECTURES=", gpu.major, gpu.minor));
    }
    if (error != cudaSuccess) return NoGpu(error).ToStatus();
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes));
    gpu.free_bytes = static_cast<int64_t>(free_bytes);
  }
  return absl::OkStatus();
}

/// Returns the bytes of the workspace including the exchange, which is the mailboxes in peer memory
/// or NCCL's communicator.
int64_t WorkspaceBytes(const WorkspacePlan& plan, Exchange exchange) {
  return exchange == Exchange::kNccl ? plan.workspace_bytes - plan.exchange_bytes + kNcclBytes
                                     : plan.workspace_bytes;
}

/// Returns the CUDA ordinals of one replica of a plan, by rank.
std::vector<int32_t> GpusOf(const EnginePlan& plan, int32_t replica) {
  std::vector<int32_t> gpus;
  for (const ShardPlace& place : plan.layout) {
    if (place.replica != replica) continue;
    const std::optional<int32_t> gpu = GpuOrdinal(place.device);
    LOGPROBD_CHECK(gpu.has_value(), place.device);
    gpus.push_back(*gpu);
  }
  return gpus;
}

/// How the shards exchange data; `why` is set if they do not use peer memory.
struct ExchangeChoice {
  Exchange exchange = Exchange::kPeer;
  std::string why;
};

/// Chooses how the shards exchange data. Returns FAILED_PRECONDITION if the GPUs cannot exchange
/// data in the requested way.
absl::StatusOr<ExchangeChoice> ChooseExchange(const EngineOptions& options,
                                              const EnginePlan& plan) {
  absl::Status peers;
  for (int32_t replica = 0; replica < plan.num_replicas(); ++replica) {
    peers.Update(CheckPeerAccess(GpusOf(plan, replica)));
  }
  if (options.exchange != Exchange::kNccl && peers.ok()) return ExchangeChoice();
  if (options.exchange == Exchange::kPeer) return peers;
  const absl::Status nccl = CheckNcclUsable();
  if (!nccl.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "shards need NCCL (", peers.ok() ? "requested" : peers.message(), "): ", nccl.message()));
  }
  return ExchangeChoice{Exchange::kNccl, std::string(peers.ok() ? "requested" : peers.message())};
}

/// Returns the reason why the fused kernel cannot be used, as a clause; empty if it can be used.
std::string WhyNoFused(const HeadInfo& head, const EngineOptions& options, int32_t gpu) {
  if (options.kernel == GpuKernel::kChunked) return "the chunked path was requested";
  if (head.dtype == Dtype::kF32) return "the fused kernel does not support fp32 heads";
  return kernels::FusedArchOf(gpu) != kernels::FusedArch::kNone
             ? ""
             : "the fused kernel needs compute capability 8.0";
}

/// Returns the buffer sizes of the shard of `tiles` on GPU `gpu`, which must exist.
WorkspacePlan WorkspacePlanOf(const HeadInfo& head, const EngineOptions& options, int32_t gpu,
                              int32_t num_shards, const TileRange& tiles) {
  WorkspacePlanOptions sizes;
  sizes.vocab_size = head.vocab_size;
  sizes.hidden_size = head.hidden_size;
  sizes.head_dtype = KernelDtype(head.dtype);
  sizes.num_shards = num_shards;
  sizes.tile_begin = tiles.begin;
  sizes.tile_end = tiles.end;
  sizes.batch_rows_max = options.batch_rows_max;
  sizes.top_k_max = options.top_k_max;
  sizes.with_fused = WhyNoFused(head, options, gpu).empty();
  int num_sms = 0;
  if (cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, gpu) == cudaSuccess) {
    sizes.num_sms = num_sms;  // Otherwise the default remains, which affects only speed.
  }
  return PlanWorkspace(sizes);
}

/// Returns the memory that one replica takes on its GPUs and on the host.
MemoryPlan ReplicaMemory(const HeadInfo& head, const EngineOptions& options, Exchange exchange,
                         absl::Span<const int32_t> gpus, absl::Span<const TileRange> tiles) {
  MemoryPlan memory;
  int64_t host_bytes = 0;
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    const WorkspacePlan plan =
        WorkspacePlanOf(head, options, gpus[rank], static_cast<int32_t>(tiles.size()), tiles[rank]);
    const std::string place = GpuName(gpus[rank]);
    memory.push_back({place, "weights", CudaHeadBytes(plan, head.has_bias)});
    memory.push_back({place, "workspace", WorkspaceBytes(plan, exchange)});
    host_bytes = ScoringEngine::kBatchesInFlight * plan.slot_bytes;
  }
  memory.push_back({"host", "workspace", host_bytes, /*is_pinned=*/true});
  return memory;
}

/// A replica under construction. The shards of all replicas load at the same time.
struct Replica {
  std::vector<int32_t> gpus;
  std::vector<std::shared_ptr<PinnedBuffer>> host_slots;
  std::vector<std::unique_ptr<CudaShard>> shards;
};

/// Creates the collective of a replica. Returns null for a single GPU.
absl::StatusOr<std::unique_ptr<Collective>> Connect(absl::Span<const int32_t> gpus,
                                                    const EnginePlan& plan,
                                                    const EngineOptions& options) {
  if (gpus.size() == 1) return nullptr;
  LOGPROBD_RETURN_IF_ERROR(EnablePeerAccess(gpus));  // Copies of hidden rows need it too.
  std::unique_ptr<Collective> collective;
  if (plan.exchange == Exchange::kNccl) {
    LOGPROBD_ASSIGN_OR_RETURN(collective, CreateNcclCollective(gpus));
  } else {
    LOGPROBD_ASSIGN_OR_RETURN(collective, CreatePeerCollective(gpus));
  }
  return options.resources->TakeCollective(std::move(collective));
}

/// Warms up the shards of each replica one after the other, and all replicas at the same time.
absl::Status WarmUp(std::vector<Replica>& replicas, const HeadInfo& info) {
  std::vector<absl::Status> statuses(replicas.size());
  kernels::ThreadPool threads(static_cast<int32_t>(replicas.size()));
  threads.ForEach(static_cast<int64_t>(replicas.size()), [&](int64_t index, int32_t /*thread*/) {
    const auto i = static_cast<size_t>(index);
    for (const std::unique_ptr<CudaShard>& shard : replicas[i].shards) {
      if (statuses[i].ok()) statuses[i] = shard->WarmUp(info);
    }
  });
  for (const absl::Status& status : statuses) {
    LOGPROBD_RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

/// Creates the engine of a replica whose shards are loaded.
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

std::string WhyNoCuda() { return FindObstacle().why; }

absl::Status CheckCudaUsable() { return FindObstacle().ToStatus(); }

absl::StatusOr<EnginePlan> PlanCudaEngine(const HeadInfo& head, const EngineOptions& options,
                                          absl::string_view why_cuda) {
  FoundGpus found = FindGpus();
  if (found.gpus.empty()) return found.obstacle.ToStatus();
  std::vector<GpuInfo> gpus = std::move(found.gpus);
  if (head.vocab_size > kVocabSizeMax) {
    return absl::FailedPreconditionError(
        absl::StrCat("the vocabulary has ", head.vocab_size,
                     " ids, which exceeds the CUDA engine's limit of ", kVocabSizeMax));
  }
  LOGPROBD_RETURN_IF_ERROR(MeasureGpus(options, gpus));
  Reserve(options.reserved, gpus);
  const int32_t first_gpu = options.gpus.empty() ? 0 : options.gpus.front();
  const auto needs_of = [&](int32_t num_shards) -> GpuNeeds {
    const absl::StatusOr<std::vector<TileRange>> tiles =
        PartitionTiles(head.vocab_size, num_shards);
    if (!tiles.ok()) return {};
    const WorkspacePlan plan =
        WorkspacePlanOf(head, options, first_gpu, num_shards, tiles->front());
    return {.weight_bytes = CudaHeadBytes(plan, head.has_bias),
            .workspace_bytes = WorkspaceBytes(plan, options.exchange)};
  };
  LOGPROBD_ASSIGN_OR_RETURN(Layout layout, PlanGpuLayout(head, options, gpus, needs_of));
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<TileRange> tiles,
                            PartitionTiles(head.vocab_size, layout.num_shards));
  EnginePlan plan;
  plan.device = Device::kCuda;
  for (const GpuInfo& gpu : gpus) plan.gpu_pci_bus_ids[gpu.ordinal] = gpu.pci_bus_id;
  plan.layout = std::move(layout.places);
  const std::vector<int32_t> used = GpusOf(plan, 0);
  const std::string why_no_fused = WhyNoFused(head, options, used.front());
  if (options.kernel == GpuKernel::kFused && !why_no_fused.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("the fused kernel was requested, but ",
                                                      why_no_fused, "; use auto or chunked"));
  }
  const WorkspacePlan workspace =
      WorkspacePlanOf(head, options, used.front(), layout.num_shards, tiles.front());
  constexpr int64_t kWorkspaceMax = WorkspacePlanOptions{}.workspace_bytes_max;
  if (workspace.workspace_bytes - workspace.exchange_bytes > kWorkspaceMax) {
    return absl::FailedPreconditionError(
        absl::StrCat("batches of ", options.batch_rows_max, " rows need ",
                     workspace.workspace_bytes >> 20, " MiB of GPU workspace, but the limit is ",
                     kWorkspaceMax >> 20, " MiB: lower --batch-rows or --top-k-max"));
  }
  ExchangeChoice exchange;
  if (layout.num_shards > 1) {
    LOGPROBD_ASSIGN_OR_RETURN(exchange, ChooseExchange(options, plan));
  }
  plan.exchange = exchange.exchange;
  plan.engine = workspace.with_fused ? "cuda/fused" : "cuda/chunked";
  plan.reason = absl::StrCat(why_cuda, why_cuda.empty() ? "" : "; ",
                             Describe(gpus[static_cast<size_t>(used.front())]));
  if (!why_no_fused.empty()) absl::StrAppend(&plan.reason, "; ", why_no_fused);
  if (!layout.reason.empty()) absl::StrAppend(&plan.reason, "; ", layout.reason);
  if (layout.num_shards > 1) {
    absl::StrAppend(&plan.reason, "; exchange through ",
                    plan.exchange == Exchange::kNccl ? "NCCL" : "peer memory",
                    exchange.why.empty() ? "" : absl::StrCat(" (", exchange.why, ")"));
  }
  for (const GpuInfo& gpu : gpus) {
    if (absl::c_any_of(plan.layout, [&gpu](const ShardPlace& place) {
          return place.device == GpuName(gpu.ordinal);
        })) {
      plan.available.push_back(
          {GpuName(gpu.ordinal), "available", gpu.free_bytes + gpu.reserved_bytes});
    }
  }
  int64_t host_bytes = 0;
  for (int32_t replica = 0; replica < plan.num_replicas(); ++replica) {
    for (const MemoryUse& use :
         ReplicaMemory(head, options, plan.exchange, GpusOf(plan, replica), tiles)) {
      if (use.place == "host") {
        host_bytes += use.bytes;
      } else {
        plan.memory.push_back(use);
      }
    }
  }
  plan.memory.push_back({"host", "workspace", host_bytes, /*is_pinned=*/true});
  return plan;
}

absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateCudaEngines(
    const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options) {
  const HeadInfo& info = weights.info();
  const int32_t num_shards = plan.num_shards();
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<TileRange> tiles,
                            PartitionTiles(info.vocab_size, num_shards));
  for (const int32_t gpu : GpusOf(plan.layout)) {
    LOGPROBD_RETURN_IF_ERROR(CheckEqualSums(info, options, gpu));
  }
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
              WorkspacePlanOf(info, options, replica.gpus.front(), num_shards, tiles.front())));
    }
  }
  LoadMeter meter(plan.num_replicas() * info.vocab_size * info.hidden_size * DtypeBytes(info.dtype),
                  options.progress);
  kernels::ThreadPool loaders(static_cast<int32_t>(plan.layout.size()));
  loaders.ForEach(static_cast<int64_t>(plan.layout.size()), [&](int64_t index, int32_t /*thread*/) {
    const ShardPlace& where = plan.layout[static_cast<size_t>(index)];
    const auto rank = static_cast<size_t>(where.shard);
    Replica& replica = replicas[static_cast<size_t>(where.replica)];
    CudaShard::Options shard;
    shard.rank = where.shard;
    shard.gpu = replica.gpus[rank];
    shard.plan = WorkspacePlanOf(info, options, shard.gpu, num_shards, tiles[rank]);
    shard.host_slots = replica.host_slots;
    shard.resources = options.resources;
    auto created = CudaShard::Create(weights, std::move(shard), meter);
    if (created.ok()) replica.shards[rank] = *std::move(created);
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
