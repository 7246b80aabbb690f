#pragma once

#include <cstdint>

#include "server/base/score_request.h"

namespace logprobd {

// What a validated request costs in memory, for the limits that bound it. Sizes of arrays, not of
// allocations; what is constant a request is bounded by the limits on requests.

/// The message as it arrived and what keeps track of its pieces: held until the payload has been
/// gathered to its last row. Rows that lie in shared memory or on a GPU keep no message, and are
/// bounded where they lie.
int64_t PayloadBytes(const ScoreRequest& request);

/// The fields decoded beside the payload: held until the request is answered.
int64_t FieldBytes(const ScoreRequest& request);

/// The arrays of its answer, those included that are only needed to make it.
int64_t AnswerBytes(const ScoreRequest& request);

}  // namespace logprobd
