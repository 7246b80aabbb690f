#pragma once

#include <cstdint>
#include <vector>

#include "client/cpp/same_host.h"

namespace logprobd::client {

/// Where a request's time went on the server, in microseconds; the longest of its parts where the
/// call was cut.
struct ServerTimings {
  uint32_t queue_us = 0;
  uint32_t copy_us = 0;
  uint32_t engine_us = 0;
  uint32_t total_us = 0;
};

/// The scores, rows in the order given. Outputs not asked for are empty. Ignored rows hold zeros,
/// rows with NaN or Inf logits NaN (ids -1). Logprobs, entropies and lse are in nats.
struct ScoreResult {
  int64_t rows = 0;
  int64_t ignored_rows = 0;
  int64_t nonfinite_rows = 0;
  /// Version of the weights that scored every row; the highest of them where they were mixed.
  uint64_t weights_version = 0;
  /// All versions that scored rows, rising: several only with
  /// Client::Options::mix_weights_versions.
  std::vector<uint64_t> weights_versions;
  int32_t top_k = 0;

  std::vector<float> logprob;             ///< [rows]
  std::vector<float> entropy;             ///< [rows]
  std::vector<float> lse;                 ///< [rows]
  std::vector<int32_t> argmax_id;         ///< [rows]
  std::vector<float> argmax_logprob;      ///< [rows]
  std::vector<uint8_t> greedy;            ///< [rows], 1: the target is the argmax.
  std::vector<float> sum_p_squared;       ///< [rows]
  std::vector<float> max_logit;           ///< [rows], before temperature.
  std::vector<float> min_logit;           ///< [rows], before temperature.
  std::vector<int32_t> top_k_ids;         ///< [rows, top_k], best first.
  std::vector<float> top_k_logprobs;      ///< [rows, top_k]
  std::vector<float> candidate_logprobs;  ///< As ScoreArgs::candidate_ids.
  std::vector<double> segment_logprob;    ///< [segments]
  std::vector<uint32_t> segment_rows;     ///< [segments], rows scored, not ignored.
  std::vector<uint8_t> segment_greedy;    ///< [segments], 1: every scored row is greedy.

  /// How most of the rows travelled.
  Transport transport = Transport::kTcp;
  ServerTimings timings;
  int32_t requests = 0;  ///< Into which the call was cut.
  int32_t retries = 0;   ///< Requests sent again.
};

}  // namespace logprobd::client
