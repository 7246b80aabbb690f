#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/head_info.h"
#include "server/base/scoring_engine.h"
#include "server/metrics/metrics.h"
#include "server/weights/head_weights.h"

namespace logprobd {

enum class Device { kAuto, kCpu, kCuda };
enum class GpuKernel { kAuto, kFused, kChunked };

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
  /// CPU threads; 0: all cores the process may use.
  int32_t cpu_threads = 0;
  /// CUDA device ordinal.
  int32_t gpu = 0;
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
  MemoryPlan memory;  ///< Weights and workspace.
};

/// FAILED_PRECONDITION when kCuda is asked for and cannot be had: it says what is missing.
absl::StatusOr<EnginePlan> PlanEngine(const HeadInfo& head, const EngineOptions& options);

/// Reads the weight into an engine as planned. Host memory beyond what the plan states stays below
/// 64 MiB. RESOURCE_EXHAUSTED names the memory that is missing.
absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateEngine(const HeadWeights& weights,
                                                            const EnginePlan& plan,
                                                            const EngineOptions& options);

}  // namespace logprobd
