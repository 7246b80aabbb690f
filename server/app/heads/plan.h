#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/app/options/server_options.h"
#include "server/base/clock.h"
#include "server/base/head_info.h"
#include "server/base/heartbeat.h"
#include "server/base/host.h"
#include "server/base/scoring_engine.h"
#include "server/batching/device_turns.h"
#include "server/engine/engines.h"
#include "server/weights/allowed_roots.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// The plan of one head: its description, engine and memory, known before any weight is read.
struct ServingPlan {
  HeadInfo head;  ///< Complete, including engine, reason and limits.
  EnginePlan engine;
  MemoryPlan memory;  ///< Weights, workspace and staging.
  std::vector<std::string> warnings;
};

/// The plans of all heads of a server and the memory that they share.
struct ServerPlan {
  std::vector<ServingPlan> heads;  ///< In the order in which they are planned and loaded.
  int64_t receive_bytes = 0;       ///< Maximum host memory for the messages of all listeners.
  int64_t shared_bytes = 0;        ///< Maximum host memory for regions that clients share.
  MemoryPlan available;            ///< Free memory, with one entry per place where it is known.

  /// Returns the memory of all heads, `receive_bytes` and `shared_bytes`, with one entry per place
  /// and kind.
  MemoryPlan memory() const;
};

/// The functions that a server is built from, which tests replace.
struct ServerParts {
  std::function<absl::StatusOr<ModelFolderHead>(const std::string& path,
                                                const ModelFolderOptions& options)>
      open_model = OpenModelFolder;
  std::function<absl::StatusOr<EnginePlan>(const HeadInfo& head, const EngineOptions& options)>
      plan_engine = PlanEngine;
  std::function<absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>>(
      const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options)>
      create_engines = CreateEngines;
  std::function<HostMemorySize()> host_memory = [] { return ReadHostMemorySize(); };
  /// Reads the settings again, for SIGHUP.
  std::function<absl::StatusOr<ServerOptions>()> read_options = [] {
    return absl::StatusOr<ServerOptions>(absl::UnimplementedError("settings cannot be read again"));
  };
  /// Tells the service manager about the server's state; see NotifyServiceManager. Called from
  /// several threads.
  std::function<absl::Status(absl::string_view message)> notify = [](absl::string_view) {
    return absl::OkStatus();
  };
  /// Interval at which the service manager gets WATCHDOG=1, as long as the threads move.
  absl::Duration notify_interval = absl::InfiniteDuration();
  /// The heartbeats of the server's threads.
  std::shared_ptr<Heartbeats> heartbeats = std::make_shared<Heartbeats>();
  /// Ends the process with kExitHung after `delay`, without help of any other thread; see
  /// ExitHungAfter.
  std::function<void(absl::Duration delay)> exit_hung_after = [](absl::Duration) {};
  const Clock* clock = &Clock::Steady();
  /// Whether to draw the progress of loading on standard error.
  bool progress_on_terminal = false;
};

/// The heads that were found, and their plan.
struct PlannedHeads {
  /// Per head; see HeadOptions. `model` is a path, also where a Hugging Face id was given.
  std::vector<ServerOptions> options;
  std::vector<std::unique_ptr<HeadWeights>> weights;  ///< Per head.
  /// Per head, the folders from which new weights may be loaded; null if loading is off.
  std::vector<std::shared_ptr<const AllowedRoots>> roots;
  ServerPlan plan;
};

/// Plans one head after another, each with the memory that the heads before it leave free. Reads
/// headers, biases and at most samples of the weights, and opens no port. Errors name the head if
/// there are several.
absl::StatusOr<PlannedHeads> PlanHeads(const ServerOptions& options, const ServerParts& parts);

ServingPlan MakeServingPlan(const ServerOptions& options, const HeadInfo& head,
                            const EnginePlan& engine, const std::vector<std::string>& warnings);

/// Combines the plans of `heads`. `host` is the memory of the host; the free memory of GPUs is part
/// of the engines' plans. Returns FAILED_PRECONDITION with the numbers if the host can never
/// provide what the heads reserve; adds a warning to the last head if it cannot provide it now.
absl::StatusOr<ServerPlan> MakeServerPlan(const ServerOptions& options,
                                          std::vector<ServingPlan> heads,
                                          const HostMemorySize& host);

/// Returns the heads of a server in their order, for DeviceTurns, or an empty vector if no two of
/// them share a device. The cost of a row is the size of its matrix product: vocabulary x hidden.
std::vector<DeviceTurns::Head> TurnHeadsOf(const ServerPlan& plan);

/// Returns whether the devices of a replica wait for each other. If so, no head may be served while
/// another is loaded, because loading launches kernels that wait too.
bool AnyWaitsForPeers(const std::vector<DeviceTurns::Head>& heads);

/// Returns the PCI bus ids of the machine's GPUs ("0000:3b:00.0"), by CUDA ordinal.
std::map<int, std::string> PciBusIdsOf(const ServerPlan& plan);

/// Returns the CUDA ordinals of the GPUs in all layouts, each once, in their order.
std::vector<int32_t> GpusOf(const ServerPlan& plan);

/// Adds `use` to the entry with its place, kind and pinning, or as a new entry.
void AddMemory(MemoryPlan& sum, const MemoryUse& use);

/// Adds every entry of `plan` to `sum`.
void AddMemory(MemoryPlan& sum, const MemoryPlan& plan);

/// Returns the bytes of all entries at `place`.
int64_t TotalBytes(const MemoryPlan& plan, absl::string_view place);

/// Returns the text of --dry-run and of the status page, with one value per line: a block for each
/// head, and a block with the sums if there are several.
std::string PlanText(const ServerPlan& plan);

}  // namespace logprobd
