#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"

namespace logprobd {

/// Where a request's time went, in seconds; the longest of its parts where it was cut.
struct StageSeconds {
  double queue = 0;
  double copy = 0;
  double engine = 0;
  double total = 0;
};

/// The answer to a ScoreRequest; arrays not asked for are empty, shapes as in proto ScoreResponse.
struct ScoreResult {
  int64_t rows = 0;
  int64_t ignored_rows = 0;
  int64_t nonfinite_rows = 0;
  uint64_t weights_version = 0;

  std::vector<float> logprob;
  std::vector<float> entropy;
  std::vector<float> lse;
  std::vector<int32_t> argmax_id;
  std::vector<float> argmax_logprob;
  std::vector<uint8_t> greedy;
  std::vector<float> sum_p_squared;
  std::vector<float> max_logit;
  std::vector<float> min_logit;
  std::vector<int32_t> top_k_ids;
  std::vector<float> top_k_logprobs;
  std::vector<float> candidate_logprobs;
  std::vector<double> segment_logprob;
  std::vector<uint32_t> segment_rows;
  std::vector<uint8_t> segment_greedy;

  StageSeconds stages;
};

/// Called exactly once, on a thread of the server; must not block.
using ScoreCallback = absl::AnyInvocable<void(absl::StatusOr<ScoreResult>) &&>;

}  // namespace logprobd
