#include "server/engine/cuda_plan.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "kernels/chunked/logit_chunk.h"
#include "kernels/fused_sm90/fused_partials.h"
#include "server/base/check.h"
#include "server/base/device_name.h"
#include "server/base/errors.h"
#include "server/engine/cuda_engine.h"
#include "server/engine/cuda_head.h"
#include "server/engine/cuda_status.h"
#include "server/engine/kernel_dtype.h"
#include "server/engine/nccl_collective.h"
#include "server/engine/peer_collective.h"
#include "server/weights/head_weights.h"

namespace logprobd {
namespace {

using kernels::ChunkPlan;

static_assert(kTopKMax == kernels::kTopKMax);

constexpr int32_t kComputeCapabilityMin = 8;

/// Device memory of an NCCL communicator; 90 to 122 MiB with NCCL 2.28 on two H200s.
constexpr int64_t kNcclBytes = int64_t{96} << 20;

absl::Status NoGpu(cudaError_t error) {
  (void)cudaGetLastError();
  return absl::FailedPreconditionError(
      absl::StrCat("no NVIDIA driver/GPU: ", cudaGetErrorString(error),
                   "; install the driver (for CUDA 13: 580 or later) or use --device cpu"));
}

/// All GPUs of the machine; their memory counts as free until it is measured.
absl::StatusOr<std::vector<GpuInfo>> FindGpus() {
  int num_gpus = 0;
  cudaError_t error = cudaGetDeviceCount(&num_gpus);
  if (error != cudaSuccess) return NoGpu(error);
  if (num_gpus == 0) return NoGpu(cudaErrorNoDevice);
  std::vector<GpuInfo> gpus;
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    cudaDeviceProp properties{};
    error = cudaGetDeviceProperties(&properties, gpu);
    if (error != cudaSuccess) return NoGpu(error);
    GpuInfo facts;
    facts.ordinal = gpu;
    facts.name = properties.name;
    facts.pci_bus_id = absl::StrCat(absl::Hex(properties.pciDomainID, absl::kZeroPad4), ":",
                                    absl::Hex(properties.pciBusID, absl::kZeroPad2), ":",
                                    absl::Hex(properties.pciDeviceID, absl::kZeroPad2), ".0");
    facts.major = properties.major;
    facts.minor = properties.minor;
    facts.total_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    // Until it is measured, which one that is too old never is.
    facts.free_bytes = facts.major < kComputeCapabilityMin ? 0 : facts.total_bytes;
    gpus.push_back(std::move(facts));
  }
  return gpus;
}

std::string Describe(const GpuInfo& gpu) {
  return absl::StrCat(gpu.name, ", compute capability ", gpu.major, ".", gpu.minor);
}

/// Takes a context on the GPUs that may be used, and so their free memory and whether this build
/// has code for them.
absl::Status MeasureGpus(const EngineOptions& options, std::vector<GpuInfo>& gpus) {
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
    if (error != cudaSuccess) return NoGpu(error);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes));
    gpu.free_bytes = static_cast<int64_t>(free_bytes);
  }
  return absl::OkStatus();
}

/// With what the exchange takes: our mailboxes, or what NCCL does.
int64_t WorkspaceBytes(const ChunkPlan& plan, Exchange exchange) {
  return exchange == Exchange::kNccl ? plan.workspace_bytes - plan.exchange_bytes + kNcclBytes
                                     : plan.workspace_bytes;
}

/// How the shards exchange, with why where it is not as usual.
struct ExchangeChoice {
  Exchange exchange = Exchange::kPeer;
  std::string why;
};

/// FAILED_PRECONDITION where the GPUs cannot exchange as they must.
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
        "shards need NCCL (", peers.ok() ? "asked for" : peers.message(), "): ", nccl.message()));
  }
  return ExchangeChoice{Exchange::kNccl, std::string(peers.ok() ? "asked for" : peers.message())};
}

/// Why the fused kernel does not score; empty where it does.
std::string WhyNoFused(const HeadInfo& head, const EngineOptions& options, int32_t gpu) {
  if (options.kernel == GpuKernel::kChunked) return "chunked was asked for";
  if (!kernels::HasFusedKernel())
    return "this build has no fused kernel (it needs CUTLASS and architecture 90)";
  if (head.dtype == Dtype::kF32) return "the fused kernel takes no fp32 head";
  int major = 0;
  int minor = 0;
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu);
  (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu);
  return major == 9 && minor == 0 ? "" : "the fused kernel needs compute capability 9.0";
}

}  // namespace

ChunkPlan ChunkPlanOf(const HeadInfo& head, const EngineOptions& options, int32_t gpu,
                      int32_t num_shards, const TileRange& tiles) {
  kernels::ChunkPlanOptions chunk_options;
  chunk_options.vocab_size = head.vocab_size;
  chunk_options.hidden_size = head.hidden_size;
  chunk_options.head_dtype = KernelDtype(head.dtype);
  chunk_options.num_shards = num_shards;
  chunk_options.tile_begin = tiles.begin;
  chunk_options.tile_end = tiles.end;
  chunk_options.batch_rows_max = options.batch_rows_max;
  chunk_options.top_k_max = options.top_k_max;
  chunk_options.with_fused = WhyNoFused(head, options, gpu).empty();
  int num_sms = 0;
  if (cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, gpu) == cudaSuccess) {
    chunk_options.num_sms = num_sms;  // else the default: only speed hangs on it
  }
  return kernels::PlanChunks(chunk_options);
}

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

MemoryPlan ReplicaMemory(const HeadInfo& head, const EngineOptions& options, Exchange exchange,
                         absl::Span<const int32_t> gpus, absl::Span<const TileRange> tiles) {
  MemoryPlan memory;
  int64_t host_bytes = 0;
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    const ChunkPlan plan =
        ChunkPlanOf(head, options, gpus[rank], static_cast<int32_t>(tiles.size()), tiles[rank]);
    const std::string place = GpuName(gpus[rank]);
    memory.push_back({place, "weights", CudaHeadBytes(plan, head.has_bias)});
    memory.push_back({place, "workspace", WorkspaceBytes(plan, exchange)});
    host_bytes = kernels::kChunkSlots * plan.slot_bytes;
  }
  memory.push_back({"host", "workspace", host_bytes, /*is_pinned=*/true});
  return memory;
}

absl::Status CheckCudaUsable() {
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<GpuInfo> gpus, FindGpus());
  for (const GpuInfo& gpu : gpus) {
    if (gpu.major >= kComputeCapabilityMin) return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "GPU 0 (", Describe(gpus.front()), ") is too old: 8.0 or later is needed; use --device cpu"));
}

absl::StatusOr<EnginePlan> PlanCudaEngine(const HeadInfo& head, const EngineOptions& options,
                                          std::string reason) {
  LOGPROBD_ASSIGN_OR_RETURN(std::vector<GpuInfo> gpus, FindGpus());
  if (head.vocab_size > kVocabSizeMax) {
    return absl::FailedPreconditionError(
        absl::StrCat("vocabulary of ", head.vocab_size, " is above the engine's ", kVocabSizeMax));
  }
  LOGPROBD_RETURN_IF_ERROR(MeasureGpus(options, gpus));
  Reserve(options.reserved, gpus);
  const int32_t first_gpu = options.gpus.empty() ? 0 : options.gpus.front();
  const auto needs_of = [&](int32_t num_shards) -> GpuNeeds {
    const absl::StatusOr<std::vector<TileRange>> tiles =
        PartitionTiles(head.vocab_size, num_shards);
    if (!tiles.ok()) return {};
    const ChunkPlan plan = ChunkPlanOf(head, options, first_gpu, num_shards, tiles->front());
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
    return absl::FailedPreconditionError(
        absl::StrCat("kernel fused was asked for, but ", why_no_fused, "; use auto or chunked"));
  }
  const ChunkPlan chunks =
      ChunkPlanOf(head, options, used.front(), layout.num_shards, tiles.front());
  constexpr int64_t kWorkspaceMax = kernels::ChunkPlanOptions{}.workspace_bytes_max;
  if (chunks.workspace_bytes - chunks.exchange_bytes > kWorkspaceMax) {
    return absl::FailedPreconditionError(
        absl::StrCat("batches of ", options.batch_rows_max, " rows need ",
                     chunks.workspace_bytes >> 20, " MiB of GPU workspace, the limit is ",
                     kWorkspaceMax >> 20, ": lower --batch-rows or --top-k-max"));
  }
  ExchangeChoice exchange;
  if (layout.num_shards > 1) {
    LOGPROBD_ASSIGN_OR_RETURN(exchange, ChooseExchange(options, plan));
  }
  plan.exchange = exchange.exchange;
  plan.engine = chunks.with_fused ? "cuda/fused" : "cuda/chunked";
  plan.reason = std::move(reason);
  const auto& gpu = gpus[static_cast<size_t>(used.front())];
  absl::StrAppend(&plan.reason, plan.reason.empty() ? "" : "; ", Describe(gpu));
  if (!why_no_fused.empty()) absl::StrAppend(&plan.reason, "; ", why_no_fused);
  if (!layout.reason.empty()) absl::StrAppend(&plan.reason, "; ", layout.reason);
  if (layout.num_shards > 1) {
    absl::StrAppend(&plan.reason, "; exchange through ",
                    plan.exchange == Exchange::kNccl ? "NCCL" : "peer memory",
                    exchange.why.empty() ? "" : absl::StrCat(" (", exchange.why, ")"));
  }
  for (const GpuInfo& facts : gpus) {
    if (absl::c_any_of(plan.layout, [&facts](const ShardPlace& place) {
          return place.device == GpuName(facts.ordinal);
        })) {
      plan.there.push_back(
          {GpuName(facts.ordinal), "there", facts.free_bytes + facts.reserved_bytes});
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

}  // namespace logprobd
