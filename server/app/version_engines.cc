#include "server/app/version_engines.h"

#include <utility>

#include "server/app/plan.h"
#include "server/base/errors.h"

namespace logprobd {

absl::StatusOr<std::unique_ptr<VersionEngines>> VersionEngines::Create(
    HeadInfo info, std::shared_ptr<const HeadWeights> weights,
    std::vector<std::unique_ptr<ScoringEngine>> engines, const Batcher::Options& options) {
  auto version = std::make_unique<VersionEngines>();
  version->info = std::make_shared<const HeadInfo>(std::move(info));
  version->weights = std::move(weights);
  version->engines = std::move(engines);
  std::vector<ScoringEngine*> replicas;
  for (const std::unique_ptr<ScoringEngine>& engine : version->engines) {
    replicas.push_back(engine.get());
  }
  LOGPROBD_ASSIGN_OR_RETURN(version->generation, VersionReplicas::Create(options, replicas));
  return version;
}

MemoryPlan VersionEngines::memory() const {
  MemoryPlan plan;
  for (const std::unique_ptr<ScoringEngine>& engine : engines) {
    for (const MemoryUse& use : engine->memory()) {
      AddMemory(plan, use);
    }
  }
  AddMemory(plan, {.place = "host", .kind = "staging", .bytes = generation->staging_bytes()});
  return plan;
}

}  // namespace logprobd
