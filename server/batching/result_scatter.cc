#include "server/batching/result_scatter.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace logprobd {
namespace {

/// Copies a column with one element per row from the batch to the request's rows.
template <typename T>
void ScatterRows(const BatchPart& part, const std::vector<T>& from, std::vector<T>& to) {
  if (part.is_contiguous()) {
    std::memcpy(to.data() + part.row_begin, from.data() + part.batch_row,
                static_cast<size_t>(part.num_rows) * sizeof(T));
    return;
  }
  part.ForEachRow([&](size_t row, size_t batch_row) { to[row] = from[batch_row]; });
}

/// Copies the first `to_width` of `from_width` elements of each row.
template <typename T>
void ScatterTopK(const BatchPart& part, const std::vector<T>& from, size_t from_width,
                 std::vector<T>& to, size_t to_width) {
  part.ForEachRow([&](size_t row, size_t batch_row) {
    std::memcpy(to.data() + row * to_width, from.data() + batch_row * from_width,
                to_width * sizeof(T));
  });
}

/// Copies the candidates of each row, which are consecutive in the batch.
template <typename T>
void ScatterCandidates(const BatchPart& part, const std::vector<T>& from, std::vector<T>& to) {
  const std::vector<uint32_t>& offsets = part.pending->request.candidate_offsets;
  auto candidate = static_cast<size_t>(part.first_candidate);
  part.ForEachRow([&](size_t row, size_t) {
    for (size_t i = offsets[row]; i < offsets[row + 1]; ++i) to[i] = from[candidate++];
  });
}

void SumSegments(PendingRequest& pending) {
  const ScoreRequest& request = pending.request;
  ScoreResult& result = pending.result;
  for (int64_t segment = 0; segment < request.num_segments(); ++segment) {
    const auto index = static_cast<size_t>(segment);
    double sum = 0;
    uint32_t rows = 0;
    bool greedy = true;
    for (size_t row = request.segment_offsets[index]; row < request.segment_offsets[index + 1];
         ++row) {
      if (request.targets[row] != request.ignore_index) {
        sum += static_cast<double>(result.logprob[row]);
        greedy = greedy && result.greedy[row] != 0;
        ++rows;
      }
    }
    result.segment_logprob[index] = sum;
    result.segment_rows[index] = rows;
    result.segment_greedy[index] = static_cast<uint8_t>(greedy);
  }
}

}  // namespace

void PrepareResult(PendingRequest& pending, uint64_t weights_version) {
  const ScoreRequest& request = pending.request;
  const OutputSet outputs = request.computed_outputs();
  const ColumnCounts counts = request.column_counts();
  ScoreResult& result = pending.result;
  result.rows = request.rows;
  result.weights_version = weights_version;
  ForEachOutputColumn([&](const auto& column) {
    if (column.IsReturned(outputs)) {
      (result.*column.values).resize(static_cast<size_t>(counts.Of(column.shape)));
    }
  });
}

ScatteredPart ScatterPart(const BatchSlot& slot, const BatchPart& part) {
  const ScoreColumns& from = slot.scores();
  const ScoreRequest& request = part.pending->request;
  ScoreResult& result = part.pending->result;
  ForEachOutputColumn([&](const auto& column) {
    auto& to = result.*column.values;
    // An empty column is not needed by this request, but other requests of the batch may need it.
    if (!column.is_from_engine() || to.empty()) return;
    switch (column.shape) {
      case ColumnShape::kRow:
        ScatterRows(part, from.*column.values, to);
        break;
      case ColumnShape::kTopK:
        ScatterTopK(part, from.*column.values, static_cast<size_t>(slot.top_k()), to,
                    static_cast<size_t>(request.top_k));
        break;
      case ColumnShape::kCandidate:
        ScatterCandidates(part, from.*column.values, to);
        break;
      case ColumnShape::kSegment:
        break;  // FinishResult sums the segments.
    }
  });
  if (!result.greedy.empty()) {
    part.ForEachRow([&](size_t row, size_t batch_row) {
      result.greedy[row] = static_cast<uint8_t>(from.argmax_id[batch_row] == request.targets[row]);
    });
  }

  ScatteredPart scattered;
  const auto nonfinite =
      absl::MakeConstSpan(slot.nonfinite())
          .subspan(static_cast<size_t>(part.batch_row), static_cast<size_t>(part.num_rows));
  scattered.nonfinite_rows =
      std::count_if(nonfinite.begin(), nonfinite.end(), [](uint8_t flag) { return flag != 0; });
  if (scattered.nonfinite_rows > 0) {
    bool found = false;
    part.ForEachRow([&](size_t row, size_t batch_row) {
      if (!found && slot.nonfinite()[batch_row] != 0) {
        found = true;
        scattered.first_nonfinite_row = static_cast<int64_t>(row);
      }
    });
  }
  return scattered;
}

absl::StatusOr<ScoreResult> FinishResult(PendingRequest& pending) {
  const ScoreRequest& request = pending.request;
  if (request.reject_nonfinite && pending.nonfinite_rows > 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hidden: the logits of row ", pending.first_nonfinite_row, " hold NaN or Inf (",
        pending.nonfinite_rows, " of ", request.rows, " rows do), and reject_nonfinite is set"));
  }
  ScoreResult& result = pending.result;
  SumSegments(pending);
  ForEachOutputColumn([&](const auto& column) {
    if (!column.IsReturned(request.outputs())) (result.*column.values).clear();
  });
  result.ignored_rows = request.rows - pending.scored_rows;
  result.nonfinite_rows = pending.nonfinite_rows;
  result.stages = pending.stages;
  result.times = pending.times;
  return std::move(result);
}

}  // namespace logprobd
