#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace logprobd {

// proto/generate.py writes the lines between [generated: NAME] and [end].

/// One bit for each score that a request can ask for; the values are those of proto Output.
///
/// A request asks for top-k, candidates and segments with other fields, so these have no bit.
enum class Output : uint32_t {
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

class OutputSet {
 public:
  constexpr OutputSet() = default;
  constexpr OutputSet(Output output) : bits_(static_cast<uint32_t>(output)) {}  // NOLINT
  constexpr explicit OutputSet(uint32_t bits) : bits_(bits) {}

  constexpr bool Has(Output output) const { return (bits_ & static_cast<uint32_t>(output)) != 0; }
  constexpr bool HasAny(OutputSet other) const { return (bits_ & other.bits_) != 0; }
  constexpr OutputSet With(Output output) const {
    return OutputSet(bits_ | static_cast<uint32_t>(output));
  }
  constexpr OutputSet Union(OutputSet other) const { return OutputSet(bits_ | other.bits_); }
  constexpr uint32_t bits() const { return bits_; }
  constexpr bool empty() const { return bits_ == 0; }

 private:
  uint32_t bits_ = 0;
};

/// The outputs of a request whose `outputs` field is 0.
inline constexpr OutputSet kDefaultOutputs =
    OutputSet().With(Output::kLogprob).With(Output::kEntropy);

/// The scores of some rows, which scoring.proto describes. A column that nobody asked for is empty.
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

/// Views of the caller's memory for the columns that an engine fills. There are no greedy flags and
/// segments, because batching computes them from these columns.
struct ScoreSpans {
  // [generated: engine_columns]
  absl::Span<float> logprob;
  absl::Span<float> entropy;
  absl::Span<float> lse;
  absl::Span<int32_t> argmax_id;
  absl::Span<float> argmax_logprob;
  absl::Span<float> sum_p_squared;
  absl::Span<float> max_logit;
  absl::Span<float> min_logit;
  absl::Span<int32_t> top_k_ids;
  absl::Span<float> top_k_logprobs;
  absl::Span<float> candidate_logprobs;
  absl::Span<int32_t> target_rank;
  // [end]
};

/// How the length of a column follows from a request or a batch.
enum class ColumnShape {
  kRow,        ///< [rows]
  kTopK,       ///< [rows, top_k]
  kCandidate,  ///< [candidates]
  kSegment,    ///< [segments]
};

/// The counts that give the length of every column.
struct ColumnCounts {
  int64_t rows = 0;
  int64_t top_k = 0;
  int64_t candidates = 0;
  int64_t segments = 0;

  /// Returns the number of elements of a column of shape `shape`.
  constexpr int64_t Of(ColumnShape shape) const {
    switch (shape) {
      case ColumnShape::kRow:
        return rows;
      case ColumnShape::kTopK:
        return rows * top_k;
      case ColumnShape::kCandidate:
        return candidates;
      case ColumnShape::kSegment:
        return segments;
    }
    return 0;
  }
};

/// A row of the table of outputs: one column of scores with elements of type `T`.
template <typename T>
struct OutputColumn {
  static constexpr int64_t kElementBytes = sizeof(T);

  absl::string_view name;   ///< Field name in proto ScoreResponse.
  uint32_t wire_field = 0;  ///< Field number in proto ScoreResponse.
  ColumnShape shape = ColumnShape::kRow;
  /// A response has the column if any of these outputs is requested; kRow columns only.
  OutputSet returned_for;
  /// An engine fills the column if any of these outputs is requested; kRow columns only.
  OutputSet scored_for;
  std::vector<T> ScoreColumns::*values = nullptr;
  absl::Span<T> ScoreSpans::*span = nullptr;  ///< Null when batching computes the column.

  constexpr bool is_from_engine() const { return span != nullptr; }

  /// Whether a response to a request for `outputs` has the column. True for columns without a bit:
  /// only ColumnCounts decides whether they have elements.
  constexpr bool IsReturned(OutputSet outputs) const {
    return shape != ColumnShape::kRow || outputs.HasAny(returned_for);
  }

  /// Whether an engine fills the column in a batch that asks for `outputs`.
  constexpr bool IsScored(OutputSet outputs) const {
    return is_from_engine() && (shape != ColumnShape::kRow || outputs.HasAny(scored_for));
  }
};

/// The table of outputs, in the order of their wire fields. All code that allocates, slices,
/// scatters or encodes scores, or computes their sizes, loops over it with ForEachOutputColumn.
inline constexpr auto kOutputColumns = std::tuple{
    // name, field, shape, returned for, scored for, values, span
    // clang-format off
    // [generated: output_table]
    OutputColumn<float>{"logprob", 10, ColumnShape::kRow, Output::kLogprob, Output::kLogprob, &ScoreColumns::logprob, &ScoreSpans::logprob},
    OutputColumn<float>{"entropy", 11, ColumnShape::kRow, Output::kEntropy, Output::kEntropy, &ScoreColumns::entropy, &ScoreSpans::entropy},
    OutputColumn<float>{"lse", 12, ColumnShape::kRow, Output::kLse, Output::kLse, &ScoreColumns::lse, &ScoreSpans::lse},
    OutputColumn<int32_t>{"argmax_id", 13, ColumnShape::kRow, Output::kArgmax, OutputSet(Output::kArgmax).With(Output::kGreedy), &ScoreColumns::argmax_id, &ScoreSpans::argmax_id},
    OutputColumn<float>{"argmax_logprob", 14, ColumnShape::kRow, Output::kArgmax, Output::kArgmax, &ScoreColumns::argmax_logprob, &ScoreSpans::argmax_logprob},
    OutputColumn<uint8_t>{"greedy", 15, ColumnShape::kRow, Output::kGreedy, {}, &ScoreColumns::greedy, nullptr},
    OutputColumn<float>{"sum_p_squared", 16, ColumnShape::kRow, Output::kSumPSquared, Output::kSumPSquared, &ScoreColumns::sum_p_squared, &ScoreSpans::sum_p_squared},
    OutputColumn<float>{"max_logit", 17, ColumnShape::kRow, Output::kMaxLogit, Output::kMaxLogit, &ScoreColumns::max_logit, &ScoreSpans::max_logit},
    OutputColumn<float>{"min_logit", 18, ColumnShape::kRow, Output::kMinLogit, Output::kMinLogit, &ScoreColumns::min_logit, &ScoreSpans::min_logit},
    OutputColumn<int32_t>{"top_k_ids", 19, ColumnShape::kTopK, {}, {}, &ScoreColumns::top_k_ids, &ScoreSpans::top_k_ids},
    OutputColumn<float>{"top_k_logprobs", 20, ColumnShape::kTopK, {}, {}, &ScoreColumns::top_k_logprobs, &ScoreSpans::top_k_logprobs},
    OutputColumn<float>{"candidate_logprobs", 21, ColumnShape::kCandidate, {}, {}, &ScoreColumns::candidate_logprobs, &ScoreSpans::candidate_logprobs},
    OutputColumn<double>{"segment_logprob", 22, ColumnShape::kSegment, {}, {}, &ScoreColumns::segment_logprob, nullptr},
    OutputColumn<uint32_t>{"segment_rows", 23, ColumnShape::kSegment, {}, {}, &ScoreColumns::segment_rows, nullptr},
    OutputColumn<uint8_t>{"segment_greedy", 24, ColumnShape::kSegment, {}, {}, &ScoreColumns::segment_greedy, nullptr},
    OutputColumn<int32_t>{"target_rank", 26, ColumnShape::kRow, Output::kTargetRank, Output::kTargetRank, &ScoreColumns::target_rank, &ScoreSpans::target_rank},
    // [end]
    // clang-format on
};

/// Calls `visit(column)` with each OutputColumn of the table.
template <typename Visit>
constexpr void ForEachOutputColumn(const Visit& visit) {
  std::apply([&visit](const auto&... columns) { (visit(columns), ...); }, kOutputColumns);
}

/// All bits of Output.
inline constexpr uint32_t kAllOutputBits = [] {
  OutputSet outputs;
  ForEachOutputColumn(
      [&outputs](const auto& column) { outputs = outputs.Union(column.returned_for); });
  return outputs.bits();
}();

/// Returns the size in bytes of all columns of a response to a request for `outputs`.
constexpr int64_t ColumnBytes(OutputSet outputs, const ColumnCounts& counts) {
  int64_t bytes = 0;
  ForEachOutputColumn([&](const auto& column) {
    if (column.IsReturned(outputs)) bytes += column.kElementBytes * counts.Of(column.shape);
  });
  return bytes;
}

/// The time that a request spent in each stage, in seconds. For a request that was cut into parts,
/// each figure is the longest of its parts.
struct StageSeconds {
  double queue = 0;
  double copy = 0;
  double engine = 0;
  double total = 0;
};

/// The times of a request's stages on the server's Clock, for requests with `trace`. Of a request
/// in several batches they are the first and the last of any batch.
struct StageTimes {
  absl::Time submitted;                           ///< The request was admitted to the queue.
  absl::Time first_cut = absl::InfiniteFuture();  ///< A batch took rows from the queue.
  absl::Time last_cut = absl::InfinitePast();
  absl::Time first_start = absl::InfiniteFuture();  ///< A batch was passed to the engine.
  absl::Time last_start = absl::InfinitePast();
  absl::Time last_end = absl::InfinitePast();  ///< The engine had scored a batch.
  double kernel_seconds = 0;                   ///< Time of the kernels, summed over the batches.

  /// False if no row was scored; then only `submitted` is set.
  bool has_batch() const { return last_end != absl::InfinitePast(); }
};

/// The answer to a ScoreRequest. Columns that the request did not ask for are empty.
struct ScoreResult : ScoreColumns {
  int64_t rows = 0;
  int64_t ignored_rows = 0;
  int64_t nonfinite_rows = 0;
  uint64_t weights_version = 0;
  StageSeconds stages;
  StageTimes times;  ///< Set if the request has `trace`.
};

/// Receives the result of a request. It is called exactly once, on a thread of the server, and must
/// not block.
using ScoreCallback = absl::AnyInvocable<void(absl::StatusOr<ScoreResult>) &&>;

}  // namespace logprobd
