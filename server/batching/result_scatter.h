#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/outputs.h"
#include "server/batching/batch_slot.h"
#include "server/batching/pending_request.h"

namespace logprobd {

/// Sizes the arrays of a request's result and fills them with zeros, which ignored rows keep. Call
/// it before the request's first part is scattered.
void PrepareResult(PendingRequest& pending, uint64_t weights_version);

/// The counts of a scattered part, which are added to those of its request.
struct ScatteredPart {
  int64_t nonfinite_rows = 0;
  int64_t first_nonfinite_row = 0;  ///< Row of the request; only valid if nonfinite_rows > 0.
};

/// Copies the scores of a part from the batch to their rows in the request's result.
ScatteredPart ScatterPart(const BatchSlot& slot, const BatchPart& part);

/// Builds the answer once all rows are scattered: sums the segments and drops arrays that were not
/// requested. Returns INVALID_ARGUMENT if the request rejects nonfinite rows and has one.
absl::StatusOr<ScoreResult> FinishResult(PendingRequest& pending);

}  // namespace logprobd
