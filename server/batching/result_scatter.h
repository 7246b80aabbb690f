#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/outputs.h"
#include "server/batching/batch_slot.h"
#include "server/batching/pending_request.h"

namespace logprobd {

/// Sizes the arrays of a request's result, all zeros: what ignored rows keep. Before its first part
/// is scattered.
void PrepareResult(PendingRequest& pending, uint64_t weights_version);

/// What a scattered part adds to its request's counts.
struct ScatteredPart {
  int64_t nonfinite_rows = 0;
  int64_t first_nonfinite_row = 0;  ///< Of the request; if there is one.
};

/// Copies the scores of a part from the batch to their rows in the request's result.
ScatteredPart ScatterPart(const BatchSlot& slot, const BatchPart& part);

/// The answer once every row is in place: segment sums are made, arrays that were not asked for are
/// dropped. INVALID_ARGUMENT for a row with NaN or Inf where the request refuses those.
absl::StatusOr<ScoreResult> FinishResult(PendingRequest& pending);

}  // namespace logprobd
