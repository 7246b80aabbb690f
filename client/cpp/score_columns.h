#pragma once

#include <array>
#include <cstdint>
#include <tuple>
#include <vector>

#include "absl/strings/string_view.h"

namespace logprobd::client {

// proto/generate.py writes the lines between [generated: NAME] and [end].

/// Bits of ScoreArgs::outputs. Top-k, candidates and segments have fields of their own.
namespace output {
enum Bits : uint32_t {
  // [generated: output_bits]
  kLogprob = 1,
  kEntropy = 2,
  kLse = 4,
  kArgmax = 8,
  kGreedy = 16,
  kSumPSquared = 32,
  kMaxLogit = 64,
  kMinLogit = 128,
  kTargetRank = 256,
  // [end]
};
inline constexpr uint32_t kDefault = kLogprob | kEntropy;
}  // namespace output

/// Names of the bits of ScoreArgs::outputs: name i belongs to bit i.
inline constexpr auto kOutputNames = std::to_array<absl::string_view>({
    // clang-format off
    // [generated: output_names]
    "logprob",
    "entropy",
    "lse",
    "argmax",
    "greedy",
    "sum_p_squared",
    "max_logit",
    "min_logit",
    "target_rank",
    // [end]
    // clang-format on
});

/// The scores of a call, which the table in proto/README.md describes. Those that were not
/// requested are empty.
struct ScoreColumns {
  // [generated: columns]
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
  std::vector<int32_t> target_rank;
  // [end]
};

/// What the elements of a column belong to.
enum class ColumnShape {
  kRow,        ///< [rows]
  kTopK,       ///< [rows, top_k]
  kCandidate,  ///< [candidates]
  kSegment,    ///< [segments]
};

/// A column of scores with elements of type `T`.
template <typename T>
struct ScoreColumn {
  absl::string_view name;  ///< Name in proto ScoreResponse.
  int field = 0;           ///< Field number in proto ScoreResponse.
  uint32_t bit = 0;        ///< Its bit in ScoreArgs::outputs, or 0 for other shapes than kRow.
  ColumnShape shape = ColumnShape::kRow;
  std::vector<T> ScoreColumns::*values = nullptr;
};

/// All columns, those of a shape in the order of their fields.
inline constexpr auto kScoreColumns = std::tuple{
    // clang-format off
    // [generated: client_table]
    ScoreColumn<float>{"logprob", 10, output::kLogprob, ColumnShape::kRow, &ScoreColumns::logprob},
    ScoreColumn<float>{"entropy", 11, output::kEntropy, ColumnShape::kRow, &ScoreColumns::entropy},
    ScoreColumn<float>{"lse", 12, output::kLse, ColumnShape::kRow, &ScoreColumns::lse},
    ScoreColumn<int32_t>{"argmax_id", 13, output::kArgmax, ColumnShape::kRow, &ScoreColumns::argmax_id},
    ScoreColumn<float>{"argmax_logprob", 14, output::kArgmax, ColumnShape::kRow, &ScoreColumns::argmax_logprob},
    ScoreColumn<uint8_t>{"greedy", 15, output::kGreedy, ColumnShape::kRow, &ScoreColumns::greedy},
    ScoreColumn<float>{"sum_p_squared", 16, output::kSumPSquared, ColumnShape::kRow, &ScoreColumns::sum_p_squared},
    ScoreColumn<float>{"max_logit", 17, output::kMaxLogit, ColumnShape::kRow, &ScoreColumns::max_logit},
    ScoreColumn<float>{"min_logit", 18, output::kMinLogit, ColumnShape::kRow, &ScoreColumns::min_logit},
    ScoreColumn<int32_t>{"target_rank", 26, output::kTargetRank, ColumnShape::kRow, &ScoreColumns::target_rank},
    ScoreColumn<int32_t>{"top_k_ids", 19, 0, ColumnShape::kTopK, &ScoreColumns::top_k_ids},
    ScoreColumn<float>{"top_k_logprobs", 20, 0, ColumnShape::kTopK, &ScoreColumns::top_k_logprobs},
    ScoreColumn<float>{"candidate_logprobs", 21, 0, ColumnShape::kCandidate, &ScoreColumns::candidate_logprobs},
    ScoreColumn<double>{"segment_logprob", 22, 0, ColumnShape::kSegment, &ScoreColumns::segment_logprob},
    ScoreColumn<uint32_t>{"segment_rows", 23, 0, ColumnShape::kSegment, &ScoreColumns::segment_rows},
    ScoreColumn<uint8_t>{"segment_greedy", 24, 0, ColumnShape::kSegment, &ScoreColumns::segment_greedy},
    // [end]
    // clang-format on
};

/// Calls `visit(column)` with each ScoreColumn of kScoreColumns.
template <typename Visit>
constexpr void ForEachScoreColumn(const Visit& visit) {
  std::apply([&visit](const auto&... columns) { (visit(columns), ...); }, kScoreColumns);
}

}  // namespace logprobd::client
