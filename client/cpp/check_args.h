#pragma once

#include "absl/status/status.h"
#include "client/cpp/score_args.h"

namespace logprobd::client {

/// Checks what the client needs to cut and send without reading out of bounds: sizes that agree and
/// offsets that rise. Values (targets, temperatures, top_k) are the server's to judge.
/// INVALID_ARGUMENT names field, value and what it must be.
absl::Status CheckScoreArgs(const ScoreArgs& args);

}  // namespace logprobd::client
