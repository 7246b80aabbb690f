#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/base/outputs.h"
#include "server/base/score_request.h"

namespace logprobd::testing {

/// What a test says of a request; the rest is filled in from `seed`.
struct RequestSpec {
  int64_t rows = 1;
  int64_t hidden_size = 4;
  Dtype dtype = Dtype::kBf16;
  uint32_t seed = 1;
  std::string client_id = "client";
  Priority priority = Priority::kNormal;
  absl::Time deadline = absl::InfiniteFuture();
  OutputSet outputs = {};  ///< Empty: the default, logprob and entropy.
  std::optional<float> temperature = {};
  std::optional<float> entropy_temperature = {};
  int64_t top_k = 0;
  std::vector<int64_t> ignored_rows = {};
  std::vector<int64_t> nonfinite_rows = {};
  std::vector<int64_t> greedy_rows = {};       ///< Their target is FakeEngine's argmax.
  std::vector<int64_t> candidate_counts = {};  ///< [rows], or empty.
  std::vector<uint32_t> segment_offsets = {};
  bool reject_nonfinite = false;
  int64_t piece_bytes = 0;   ///< The payload comes in pieces of this size; 0: in one.
  int64_t misalignment = 0;  ///< Bytes by which each piece's address is off.
  int64_t vocab_size = 1'000;
  PayloadPlace place = PayloadPlace::kMessage;
  bool is_pinned = false;
  int32_t gpu = -1;
};

/// A request as validation would pass it on, with payload bytes from `seed`.
ScoreRequest MakeRequest(const RequestSpec& spec);

/// As MakeRequest with only the number of rows said.
ScoreRequest RequestOfRows(int64_t rows);

/// What a server on a FakeEngine must answer, computed row by row from the request.
ScoreResult ExpectedResult(const ScoreRequest& request, int64_t vocab_size = 1'000,
                           uint64_t weights_version = 1);

/// The names of the fields (stages aside) whose bits differ, comma-separated; empty when none.
std::string Differences(const ScoreResult& actual, const ScoreResult& expected);

}  // namespace logprobd::testing
