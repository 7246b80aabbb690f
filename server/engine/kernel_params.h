#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/common/dtype.h"
#include "server/base/head_info.h"
#include "server/base/outputs.h"

// Converts the server's types to the types of kernels/.

namespace logprobd {

constexpr kernels::Dtype KernelDtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return kernels::Dtype::kBf16;
    case Dtype::kF16:
      return kernels::Dtype::kF16;
    case Dtype::kF32:
      break;
  }
  return kernels::Dtype::kF32;
}

/// Calls `visit(column)` for each column that engines fill with one score per row.
template <typename Visit>
constexpr void ForEachRowColumn(const Visit& visit) {
  ForEachOutputColumn([&visit](const auto& column) {
    if (column.is_from_engine() && column.shape == ColumnShape::kRow) visit(column);
  });
}

inline constexpr size_t kNumRowColumns = [] {
  size_t count = 0;
  ForEachRowColumn([&count](const auto& /*column*/) { ++count; });
  return count;
}();

/// The pointers through which kernels return scores per row: kernels::RowScoresParams on a GPU and
/// kernels::ScoreRowsParams on a CPU. proto/generate.py writes the lines.
template <typename Params>
inline constexpr auto kRowScorePointers = std::tuple{
    // [generated: row_score_pointers]
    std::pair{&ScoreSpans::logprob, &Params::logprob},
    std::pair{&ScoreSpans::entropy, &Params::entropy},
    std::pair{&ScoreSpans::lse, &Params::lse},
    std::pair{&ScoreSpans::argmax_id, &Params::argmax_id},
    std::pair{&ScoreSpans::argmax_logprob, &Params::argmax_logprob},
    std::pair{&ScoreSpans::sum_p_squared, &Params::sum_p_squared},
    std::pair{&ScoreSpans::max_logit, &Params::max_logit},
    std::pair{&ScoreSpans::min_logit, &Params::min_logit},
    std::pair{&ScoreSpans::target_rank, &Params::target_rank},
    // [end]
};

/// Sets the pointer of `params` through which kernels return `column`.
template <typename Params, typename T>
void SetRowScore(Params& params, const OutputColumn<T>& column, T* scores) {
  static_assert(std::tuple_size_v<decltype(kRowScorePointers<Params>)> == kNumRowColumns,
                "kRowScorePointers has a line for every output of an engine");
  const auto set_if_same = [&](const auto& line) {
    if constexpr (std::is_same_v<decltype(line.second), T * Params::*>) {
      if (line.first == column.span) params.*line.second = scores;
    }
  };
  std::apply([&](const auto&... lines) { (set_if_same(lines), ...); }, kRowScorePointers<Params>);
}

}  // namespace logprobd
