#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/app/load_ticker.h"
#include "server/app/version_engines.h"
#include "server/base/clock.h"
#include "server/base/weight_store.h"
#include "server/batching/batcher.h"
#include "server/engine/engines.h"
#include "server/metrics/metrics.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// Makes versions of a head out of folders, step by step: Open, Plan, CheckHostMemory,
/// CheckContent, Make. Nothing of what is served changes by it. Thread-safe.
class VersionLoader {
 public:
  /// What versions are made with, so that tests can put in their own.
  struct Parts {
    std::function<absl::StatusOr<ModelFolderHead>(const std::string& path,
                                                  const ModelFolderOptions& options)>
        open_model;
    std::function<absl::StatusOr<EnginePlan>(const HeadInfo& head, const EngineOptions& options)>
        plan_engine;
    std::function<absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>>(
        const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options)>
        create_engines;
    std::function<absl::StatusOr<int64_t>()> available_host_bytes;
    const Clock* clock = &Clock::Steady();
  };

  struct Options {
    /// As at start; `roots` null: nothing may be loaded.
    ModelFolderOptions model;
    EngineOptions engine;      ///< As at start.
    Batcher::Options batcher;  ///< As the head's.
    EnginePlan plan;           ///< Of the first version: others lie as it does.
  };

  /// A folder's head that may become a version.
  struct Candidate {
    std::shared_ptr<const HeadWeights> weights;
    WeightsVersion facts;  ///< Without the time of loading; without the sha256 before CheckContent.
  };

  /// `metrics` must outlive it.
  VersionLoader(Options options, Parts parts, Metrics& metrics);

  /// Finds the head in the folder that `load` names, to be version `number`. Errors are those of
  /// OpenModelFolder; PERMISSION_DENIED: nothing may be loaded; INVALID_ARGUMENT: it has not the
  /// shape of `live`, or `load.sha256` is none.
  absl::StatusOr<Candidate> Open(const WeightsLoad& load, uint64_t number,
                                 const HeadInfo& live) const;

  /// Its engines. RESOURCE_EXHAUSTED, with the numbers: GPUs or the host have no room for them,
  /// even once `freed` is given back. `live` is of a version that has engines, or had.
  absl::StatusOr<EnginePlan> Plan(const HeadInfo& found, const HeadInfo& live,
                                  const MemoryPlan& freed) const;

  /// Reads the whole weight and fills in its sha256. DATA_LOSS: another one was asked for;
  /// INVALID_ARGUMENT: it is not finite, which `load` does not allow; `ticker`'s errors.
  absl::Status CheckContent(const WeightsLoad& load, Candidate& candidate,
                            LoadTicker& ticker) const;

  /// Reads the weight into engines. Errors are theirs and `ticker`'s.
  absl::StatusOr<std::unique_ptr<VersionEngines>> Make(
      const std::shared_ptr<const HeadWeights>& weights, const EnginePlan& plan,
      LoadTicker& ticker) const;

  /// The engines of a version that has been made before, on an empty place.
  EnginePlan PlanOf(const VersionEngines& made) const;

 private:
  absl::Status CheckHostMemory(const HeadInfo& found, const HeadInfo& live, const EnginePlan& plan,
                               const MemoryPlan& freed) const;
  absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateEngines(
      const HeadWeights& weights, const EnginePlan& plan, LoadTicker& ticker) const;

  const std::string& name() const { return options_.model.head_name; }

  const Options options_;
  const EngineOptions engine_options_;  // with the layout of the plan
  const Parts parts_;
  Metrics& metrics_;
};

}  // namespace logprobd
