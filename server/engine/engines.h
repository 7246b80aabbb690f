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
#include "server/base/clock.h"
#include "server/base/head_info.h"
#include "server/base/scoring_engine.h"
#include "server/engine/fault_points.h"
#include "server/metrics/metrics.h"
#include "server/weights/head_weights.h"

namespace logprobd {

enum class Device { kAuto, kCpu, kCuda };
enum class GpuKernel { kAuto, kFused, kChunked };
/// How the shards of a replica join what they know; kAuto: through peer memory where it can.
enum class Exchange { kAuto, kPeer, kNccl };

/// What the engines' top-k kernels can do.
inline constexpr int32_t kTopKMax = 128;

struct EngineOptions {
  Device device = Device::kAuto;
  /// Most rows of a batch, >= 1; fixes the workspace.
  int64_t batch_rows_max = 8'192;
  /// Most places of a row's top-k list, 0 to kTopKMax; fixes the workspace.
  int32_t top_k_max = 128;
  /// How a GPU makes scores; kAuto takes the fused kernel where it runs.
  GpuKernel kernel = GpuKernel::kAuto;
  Exchange exchange = Exchange::kAuto;
  /// CPU threads; 0: all cores the process may use.
  int32_t cpu_threads = 0;
  /// CUDA device ordinals, in the order in which they are taken; empty: all that are visible.
  std::vector<int32_t> gpus = {};
  /// GPUs (or groups of CPU threads) that share one head; 0: chosen. See layout.h.
  int32_t shards = 0;
  /// Whole heads, each on `shards` GPUs; 0: chosen.
  int32_t replicas = 0;
  /// Memory that other heads of this server will take, of which nothing is allocated yet: what is
  /// free on a GPU is less by it. Negative: what is given back before. Of PlanEngine.
  MemoryPlan reserved = {};
  /// Longest time that a batch may take before its replica counts as hung; infinite: no limit.
  absl::Duration batch_time_max = absl::InfiniteDuration();
  const Clock* clock = &Clock::Steady();  ///< Of batch_time_max.
  FaultPoints faults = {};                ///< For tests.
  /// Told while the weight is read: bytes done and in all. May be empty.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress = {};
  /// May be null. Must outlive the engine.
  Metrics* metrics = nullptr;
};

/// Which engine would serve a head, and why, with its memory; made without touching the weight.
struct EnginePlan {
  Device device = Device::kCpu;  ///< Never kAuto.
  std::string engine;            ///< "cpu/avx512", "cuda/fused".
  std::string reason;
  std::vector<ShardPlace> layout;       ///< Replica by replica, shard by shard.
  MemoryPlan memory;                    ///< Weights and workspace of all of them.
  Exchange exchange = Exchange::kAuto;  ///< Of shards on GPUs, decided.
  /// Where the machine's GPUs sit ("0000:3b:00.0"), by CUDA ordinal.
  std::map<int, std::string> gpu_pci_bus_ids = {};
  MemoryPlan there = {};  ///< Free at each GPU of the layout, before this head and `reserved`.

  int32_t num_replicas() const { return layout.empty() ? 1 : layout.back().replica + 1; }
  int32_t num_shards() const { return layout.empty() ? 1 : layout.back().shard + 1; }
};

/// FAILED_PRECONDITION when kCuda is asked for and cannot be had: it says what is missing.
absl::StatusOr<EnginePlan> PlanEngine(const HeadInfo& head, const EngineOptions& options);

/// Reads the weight into engines as planned, one a replica, all at once. Host memory beyond what
/// the plan states stays below 64 MiB a shard. RESOURCE_EXHAUSTED names the memory that is missing.
absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateEngines(
    const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options);

}  // namespace logprobd
