#pragma once

#include <cstdint>
#include <vector>

#include "client/cpp/score.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// The rows of a call that are sent in one request, and their candidates, as half-open ranges.
struct Chunk {
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int64_t candidate_begin = 0;
  int64_t candidate_end = 0;

  int64_t rows() const { return row_end - row_begin; }
};

/// Division of a call into requests.
struct ChunkPlan {
  std::vector<Chunk> chunks;  ///< In row order; at least one.
  /// The client sums segments from per-row logprobs, because they do not fit in one request.
  bool sum_segments_in_client = false;
};

/// Splits a call into chunks of about equal length. Each chunk keeps `limits` and, if possible, has
/// at most `request_bytes` of hidden states and candidates. A single row above the limits gets its
/// own chunk, and the server reports the error. `args` must have passed CheckScoreArgs.
ChunkPlan PlanChunks(const ScoreArgs& args, const Limits& limits, int64_t request_bytes);

}  // namespace logprobd::client
