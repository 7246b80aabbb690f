#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/app/heads/load_control.h"
#include "server/base/clock.h"
#include "server/base/head_info.h"
#include "server/base/scoring_engine.h"
#include "server/base/weight_store.h"
#include "server/batching/batcher.h"
#include "server/batching/version_replicas.h"
#include "server/engine/engines.h"
#include "server/metrics/metrics.h"
#include "server/weights/head_weights.h"
#include "server/weights/pushed_weights.h"

namespace logprobd {

/// One version of a head in memory: the live one, or one next to it.
struct VersionEngines {
  /// Returns RESOURCE_EXHAUSTED if there is no staging memory, or another error of
  /// VersionReplicas::Create.
  static absl::StatusOr<std::unique_ptr<VersionEngines>> Create(
      HeadInfo info, std::shared_ptr<const HeadWeights> weights,
      std::vector<std::unique_ptr<ScoringEngine>> engines, const Batcher::Options& options);

  bool IsAnyHealthy() const { return replicas->NumHealthy() > 0; }
  /// Returns weights, workspace and staging of all replicas, with one entry per place and kind.
  MemoryPlan memory() const;

  std::shared_ptr<const HeadInfo> info;
  std::shared_ptr<const HeadWeights> weights;           ///< Stays open for Verify.
  std::vector<std::unique_ptr<ScoringEngine>> engines;  ///< One engine per replica.
  std::unique_ptr<VersionReplicas> replicas;            ///< Uses `engines`; destroyed before them.
  WeightsVersion version;                               ///< Set by HeadVersions.
};

/// Makes versions of a head from folders, step by step: Open, Plan, CheckContent, Make. It changes
/// nothing that is served. Thread-safe.
class VersionLoader {
 public:
  /// The functions that make versions; tests replace them.
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
    /// Options at the start of the server; if `roots` is null nothing can be loaded.
    ModelFolderOptions model;
    EngineOptions engine;      ///< Options at the start of the server.
    Batcher::Options batcher;  ///< Options of the head's batcher.
    EnginePlan plan;           ///< Plan of the first version; later versions have its layout.
  };

  /// The head of a folder that may become a version.
  struct Candidate {
    std::shared_ptr<const HeadWeights> weights;
    /// The time of loading is not set yet, and the sha256 is not set until CheckContent has run.
    WeightsVersion version;
  };

  /// `metrics` must outlive the loader.
  VersionLoader(Options options, Parts parts, Metrics& metrics);

  /// Finds the head in the folder that `load` names, as version `number`. Returns the errors of
  /// OpenModelFolder; PERMISSION_DENIED if loading is off; INVALID_ARGUMENT if the head does not
  /// have the shape and dtype of `live` or `load.sha256` is malformed.
  absl::StatusOr<Candidate> Open(const WeightsLoad& load, uint64_t number,
                                 const HeadInfo& live) const;

  /// Describes the weight whose rows `push` sends. Returns PERMISSION_DENIED if loading is off, and
  /// INVALID_ARGUMENT if the header is malformed or does not have the shape and dtype of `live`.
  absl::StatusOr<HeadInfo> PushedHead(const WeightsPush& push, const HeadInfo& live) const;

  /// Takes the memory for the rows of a result of PushedHead, and writes to it, which may take
  /// seconds. Returns RESOURCE_EXHAUSTED if the host has no room for them.
  absl::StatusOr<std::shared_ptr<PushedWeights>> OpenPush(const HeadInfo& info) const;

  /// Plans the engines. Returns RESOURCE_EXHAUSTED with the numbers if GPUs or host have no room
  /// for them even after `freed` is released.
  absl::StatusOr<EnginePlan> Plan(const HeadInfo& found, const MemoryPlan& freed) const;

  /// Reads the whole weight and sets its sha256. Returns DATA_LOSS if the sha256 differs from the
  /// expected one, INVALID_ARGUMENT if values are not finite and `load` does not allow that, or an
  /// error of `ticker`.
  absl::Status CheckContent(const WeightsLoad& load, Candidate& candidate,
                            LoadTicker& ticker) const;

  /// Reads the weight into new engines. Returns their errors and those of `ticker`.
  absl::StatusOr<std::unique_ptr<VersionEngines>> Make(
      const std::shared_ptr<const HeadWeights>& weights, const EnginePlan& plan,
      LoadTicker& ticker) const;

  /// Returns the plan that makes the engines of `made` again after their memory is free.
  EnginePlan PlanOf(const VersionEngines& made) const;

 private:
  absl::Status CheckLoadingIsOn() const;
  absl::Status CheckHostMemory(const HeadInfo& found, const EnginePlan& plan,
                               const MemoryPlan& freed) const;
  /// Creates the engines on a separate thread, so that the caller's thread can report progress and
  /// notice a cancellation meanwhile.
  absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateEngines(
      const HeadWeights& weights, const EnginePlan& plan, LoadTicker& ticker) const;

  const std::string& name() const { return options_.model.head_name; }

  const Options options_;
  const EngineOptions engine_options_;  // with the layout of the first version's plan
  const Parts parts_;
  Metrics& metrics_;
};

}  // namespace logprobd
