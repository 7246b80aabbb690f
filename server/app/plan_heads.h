#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/app/plan.h"
#include "server/app/server_options.h"
#include "server/base/clock.h"
#include "server/base/host.h"
#include "server/base/scoring_engine.h"
#include "server/engine/engines.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// What a server is made of, so that tests can put in their own.
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
  const Clock* clock = &Clock::Steady();
  /// Draw the loading on standard error.
  bool progress_on_terminal = false;
};

/// The heads as found and what serving them would take.
struct PlannedHeads {
  std::vector<ServerOptions> options;                 ///< Of each head; see HeadOptions.
  std::vector<std::unique_ptr<HeadWeights>> weights;  ///< Of each head.
  /// Where new weights of each head may be loaded from; null: nowhere.
  std::vector<std::shared_ptr<const AllowedRoots>> roots;
  ServerPlan plan;
};

/// Plans one head after the other, each with what those before it leave free. Reads headers, biases
/// and at most samples of the weights, and opens no port. Errors name the head where there are
/// several.
absl::StatusOr<PlannedHeads> PlanHeads(const ServerOptions& options, const ServerParts& parts);

}  // namespace logprobd
