#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "client/cpp/score.h"
#include "tests/support/fake_scoring_service.h"

namespace logprobd::client {

/// The memory and the arguments of a call with `rows` rows of 8 bf16 elements. All rows differ.
struct ScoreCase {
  explicit ScoreCase(int64_t rows) : hidden(static_cast<size_t>(rows) * 16) {
    for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = static_cast<std::byte>(i * 7 % 251);
    for (int64_t row = 0; row < rows; ++row) targets.push_back(static_cast<int32_t>(row % 100));
    args.hidden = hidden;
    args.dtype = Dtype::kBf16;
    args.rows = rows;
    args.hidden_size = 8;
    args.targets = targets;
  }

  /// Returns the logprob that FakeScoringService gives the row.
  float logprob(int64_t row) const {
    return testing::FakeLogprob(reinterpret_cast<const char*>(hidden.data()) + row * 16, 16,
                                targets[static_cast<size_t>(row)]);
  }

  std::vector<std::byte> hidden;
  std::vector<int32_t> targets;
  std::vector<int32_t> candidate_ids;
  std::vector<int64_t> candidate_offsets;
  std::vector<int64_t> segment_offsets;
  ScoreArgs args;
};

}  // namespace logprobd::client
