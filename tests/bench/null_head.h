#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/base/clock.h"
#include "server/base/served_head.h"
#include "server/metrics/metrics.h"

namespace logprobd::testing {

/// A head with the real Batcher over an engine that computes nothing: what is left is the cost of
/// everything around the engine. Hidden size 4,096, vocabulary 151,936. Scores are all 0.
absl::StatusOr<std::shared_ptr<ServedHead>> MakeNullHead(const Clock& clock, Metrics& metrics);

}  // namespace logprobd::testing
