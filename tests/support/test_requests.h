#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/base/outputs.h"
#include "server/base/score_request.h"

namespace logprobd::testing {

/// The properties of a request that matter to a test. The other fields follow from `seed`.
struct RequestSpec {
  int64_t rows = 1;
  int64_t hidden_size = 4;
  Dtype dtype = Dtype::kBf16;
  uint32_t seed = 1;
  std::string client_id = "client";
  std::string sub_client_id = {};
  Priority priority = Priority::kNormal;
  absl::Time deadline = absl::InfiniteFuture();
  OutputSet outputs = {};  ///< Empty means the default, logprob and entropy.
  std::optional<float> temperature = {};
  std::optional<float> entropy_temperature = {};
  int64_t top_k = 0;
  std::vector<int64_t> ignored_rows = {};
  std::vector<int64_t> nonfinite_rows = {};
  std::vector<int64_t> greedy_rows = {};       ///< Rows whose target is FakeEngine's argmax.
  std::vector<int64_t> candidate_counts = {};  ///< [rows], or empty.
  std::vector<uint32_t> segment_offsets = {};
  bool reject_nonfinite = false;
  int64_t piece_bytes = 0;   ///< Size of the pieces of the payload; 0 means one piece.
  int64_t misalignment = 0;  ///< Offset of each piece from an aligned address, in bytes.
  int64_t vocab_size = 1'000;
  PayloadPlace place = PayloadPlace::kMessage;
  bool is_pinned = false;
  int32_t gpu = -1;
};

/// Returns a validated request, with payload bytes that follow from `seed`.
ScoreRequest MakeRequest(const RequestSpec& spec);

/// Returns MakeRequest with `rows` rows and default properties.
ScoreRequest RequestOfRows(int64_t rows);

/// Returns the answer that a server with a FakeEngine must give, computed row by row from the
/// request.
ScoreResult ExpectedResult(const ScoreRequest& request, int64_t vocab_size = 1'000,
                           uint64_t weights_version = 1);

/// Returns the names of the fields whose bits differ, separated by commas, or an empty string if
/// none differ. Does not compare stages.
std::string Differences(const ScoreResult& actual, const ScoreResult& expected);

}  // namespace logprobd::testing
