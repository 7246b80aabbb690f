#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/base/head_info.h"
#include "server/base/scoring_engine.h"
#include "server/base/weight_store.h"
#include "server/batching/batcher.h"
#include "server/batching/version_replicas.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// One version of a head in memory: live, or beside the live one.
struct VersionEngines {
  /// RESOURCE_EXHAUSTED: no staging memory; other errors are those of VersionReplicas::Create.
  static absl::StatusOr<std::unique_ptr<VersionEngines>> Create(
      HeadInfo info, std::shared_ptr<const HeadWeights> weights,
      std::vector<std::unique_ptr<ScoringEngine>> engines, const Batcher::Options& options);

  bool IsAnyHealthy() const { return generation->NumHealthy() > 0; }
  /// Weights, workspace and staging of all replicas; an entry for each place and kind.
  MemoryPlan memory() const;

  std::shared_ptr<const HeadInfo> info;
  std::shared_ptr<const HeadWeights> weights;           ///< Kept open for Verify.
  std::vector<std::unique_ptr<ScoringEngine>> engines;  ///< One a replica.
  std::unique_ptr<VersionReplicas> generation;          ///< Of `engines`; goes before them.
  WeightsVersion facts;                                 ///< For HeadVersions.
};

}  // namespace logprobd
