#pragma once

#include <cstdint>
#include <vector>

#include "client/cpp/score.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// Rows of a call that travel in one request; the candidate range follows from them.
struct Chunk {
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int64_t candidate_begin = 0;
  int64_t candidate_end = 0;

  int64_t rows() const { return row_end - row_begin; }
};

/// How a call is cut into requests.
struct ChunkPlan {
  std::vector<Chunk> chunks;  ///< In row order, at least one.
  /// Segments are summed here from per-row logprobs, because a request cannot hold them whole.
  bool sum_segments_in_client = false;
};

/// Cuts so that every request keeps `limits` and, where possible, has at most `request_bytes` of
/// hidden states and candidates, into chunks of about equal length. A single row beyond the limits
/// gets a chunk of its own; the server then says what is wrong. `args` has been checked
/// (CheckScoreArgs).
ChunkPlan PlanChunks(const ScoreArgs& args, const Limits& limits, int64_t request_bytes);

}  // namespace logprobd::client
