#pragma once

#include <cstdint>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "server/base/outputs.h"

namespace logprobd {

/// The seconds that a request spent in each stage. For a request that was cut into parts, each
/// figure is the longest of its parts.
struct StageSeconds {
  double queue = 0;
  double copy = 0;
  double engine = 0;
  double total = 0;
};

/// The answer to a ScoreRequest. Columns that the request did not ask for are empty.
struct ScoreResult : ScoreColumns {
  int64_t rows = 0;
  int64_t ignored_rows = 0;
  int64_t nonfinite_rows = 0;
  uint64_t weights_version = 0;
  StageSeconds stages;
};

/// Called exactly once, on a thread of the server; must not block.
using ScoreCallback = absl::AnyInvocable<void(absl::StatusOr<ScoreResult>) &&>;

}  // namespace logprobd
