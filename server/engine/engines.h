#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/base/client_memory.h"
#include "server/base/clock.h"
#include "server/base/head_info.h"
#include "server/base/heartbeat.h"
#include "server/base/scoring_engine.h"
#include "server/engine/engine_resources.h"
#include "server/metrics/metrics.h"
#include "server/weights/head_weights.h"

namespace logprobd {

enum class Device { kAuto, kCpu, kCuda };
enum class GpuKernel { kAuto, kFused, kChunked };
/// How the shards of a replica on GPUs exchange data. kAuto uses peer memory if all GPUs can access
/// each other's memory, otherwise NCCL.
enum class Exchange { kAuto, kPeer, kNccl };

/// Longest top-k list that the kernels of all engines support.
inline constexpr int32_t kTopKMax = 128;

/// Options of an engine. This struct defines the defaults of all engine options.
struct EngineOptions {
  Device device = Device::kAuto;
  /// Maximum number of rows of a batch, >= 1; determines the size of the workspace.
  int64_t batch_rows_max = kDefaultBatchRowsMax;
  /// Longest top-k list of a row, 0 to kTopKMax; determines the size of the workspace.
  int32_t top_k_max = 128;
  /// Which kernels score on a GPU; kAuto uses the fused kernel on GPUs that support it.
  GpuKernel kernel = GpuKernel::kAuto;
  Exchange exchange = Exchange::kAuto;
  /// Number of CPU threads; 0 means one for each core that the process may use.
  int32_t cpu_threads = 0;
  /// CUDA ordinals of the GPUs to use, in this order; if empty, all visible GPUs may be used.
  std::vector<int32_t> gpus = {};
  /// Number of GPUs (or groups of CPU threads) that share one head; 0 lets the planner choose. See
  /// layout.h.
  int32_t shards = 0;
  /// Number of whole copies of the head, each on `shards` GPUs; 0 lets the planner choose.
  int32_t replicas = 0;
  /// Memory that other heads of this server will take and have not allocated yet. PlanEngine
  /// subtracts it from the free memory. Negative sizes mean memory that will be released before the
  /// engine is created.
  MemoryPlan reserved = {};
  /// Longest time for a batch, after which its replica counts as hung; infinite means no limit.
  absl::Duration batch_time_max = absl::InfiniteDuration();
  const Clock* clock = &Clock::Steady();  ///< Measures batch_time_max.
  /// Table for the heartbeats of the engines' threads; may be null. Must outlive the engines.
  Heartbeats* heartbeats = nullptr;
  EngineResources* resources = &EngineResources::Real();  ///< Must outlive the engines.
  /// Folder for what the engine remembers across starts, or empty. See CheckUnlessKnown.
  std::string state_dir = {};
  /// Called while the weight is read, with the bytes read so far and in total. May be empty.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress = {};
  /// Metrics of the server; may be null. Must outlive the engine.
  Metrics* metrics = nullptr;
};

/// The engine that would score with a head, the reason for this choice, and the memory that the
/// engine would take.
struct EnginePlan {
  Device device = Device::kCpu;         ///< Never kAuto.
  std::string engine;                   ///< For example "cpu/avx512" or "cuda/fused".
  std::string reason;                   ///< Why this engine and layout were chosen, for the log.
  std::vector<ShardPlace> layout;       ///< Replica by replica, shard by shard.
  MemoryPlan memory;                    ///< Weights and workspace of all replicas.
  Exchange exchange = Exchange::kAuto;  ///< The choice for shards on GPUs.
  /// PCI bus ids of the machine's GPUs ("0000:3b:00.0") by CUDA ordinal.
  std::map<int, std::string> gpu_pci_bus_ids = {};
  /// Free memory of each GPU of the layout, before this head and `reserved` are subtracted.
  MemoryPlan available = {};

  int32_t num_replicas() const { return layout.empty() ? 1 : layout.back().replica + 1; }
  int32_t num_shards() const { return layout.empty() ? 1 : layout.back().shard + 1; }
};

/// Plans an engine without reading the weight. Returns FAILED_PRECONDITION if kCuda is requested
/// and cannot be used; the message says what is missing.
absl::StatusOr<EnginePlan> PlanEngine(const HeadInfo& head, const EngineOptions& options);

/// Creates the planned engines, one per replica, and reads the weight. Takes less than 64 MiB of
/// host memory per shard in addition to the plan. If memory runs out, returns RESOURCE_EXHAUSTED,
/// and the message names the buffer.
absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateEngines(
    const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options);

// Memory that clients on this host share with the engines of a plan. The objects must outlive every
// payload and be destroyed before CUDA is.

/// Creates an object that pins host memory for the GPUs of the plan and does nothing on a CPU.
std::unique_ptr<HostPinning> CreateHostPinning(const EnginePlan& plan);

/// Creates an object that maps memory of other processes on the GPUs of the plan and on the GPUs
/// that all of them can access. Returns FAILED_PRECONDITION if the plan uses a CPU, and
/// RESOURCE_EXHAUSTED if the object's thread cannot be started. `metrics` must outlive the result.
absl::StatusOr<std::unique_ptr<DeviceMemory>> CreateDeviceMemory(const EnginePlan& plan,
                                                                 Metrics& metrics);

}  // namespace logprobd
