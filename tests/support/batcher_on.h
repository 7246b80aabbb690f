#pragma once

#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/errors.h"
#include "server/batching/batcher.h"
#include "server/batching/version_replicas.h"

namespace logprobd::testing {

/// Returns a Batcher on `replicas` that owns its only version. `replicas`, `clock` and `metrics`
/// must outlive it.
inline absl::StatusOr<std::shared_ptr<Batcher>> BatcherOn(absl::Span<ScoringEngine* const> replicas,
                                                          const Batcher::Options& options,
                                                          const Clock& clock, Metrics& metrics) {
  struct Owner {
    std::unique_ptr<VersionReplicas> version;
    std::unique_ptr<Batcher> batcher;  // Destroyed before the version.
  };
  auto owner = std::make_shared<Owner>();
  LOGPROBD_ASSIGN_OR_RETURN(owner->version, VersionReplicas::Create(options, replicas));
  LOGPROBD_ASSIGN_OR_RETURN(owner->batcher,
                            Batcher::Create(options, *owner->version, clock, metrics));
  return std::shared_ptr<Batcher>(owner, owner->batcher.get());
}

}  // namespace logprobd::testing
