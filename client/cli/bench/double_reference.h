#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/types/span.h"
#include "client/cli/bench/model_head.h"
#include "client/cpp/score.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// A row to score in double precision.
struct ReferenceRow {
  const std::byte* hidden = nullptr;  ///< `dtype` [hidden_size]
  int32_t target = 0;
};

struct ReferenceScore {
  double logprob = 0;
  double entropy = 0;
};

/// Scores rows at temperature 1 from the exact stored values, all in double:
///   z = cap(scale * (h . w) + bias), cap(x) = c * tanh(x / c)
///   logprob = z[target] - lse(z), entropy = lse(z) - sum p z, over the head's valid vocabulary.
/// On every core. `on_progress` is called from time to time, on this thread, with the share done.
std::vector<ReferenceScore> ScoreInDouble(const ModelHead& model, const Head& head, Dtype dtype,
                                          absl::Span<const ReferenceRow> rows,
                                          const std::function<void(double)>& on_progress);

}  // namespace logprobd::client
