#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "server/base/scoring_engine.h"

namespace logprobd {

/// INVALID_ARGUMENT if the engine was not sized for `batch`: that batch fails, nothing else.
absl::Status CheckBatchFits(const ScoreBatch& batch, int64_t batch_rows_max, int32_t top_k_max);

}  // namespace logprobd
