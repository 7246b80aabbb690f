#include "server/batching/result_scatter.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace logprobd {
namespace {

/// Copies a column of the batch to the request's rows. An array that the request has not sized was
/// asked for by others.
template <typename T>
void ScatterColumn(const BatchPart& part, const std::vector<T>& from, std::vector<T>& to) {
  if (to.empty()) {
    return;
  }
  if (part.is_contiguous()) {
    std::memcpy(to.data() + part.row_begin, from.data() + part.batch_row,
                static_cast<size_t>(part.num_rows) * sizeof(T));
    return;
  }
  part.ForEachRow([&](size_t row, size_t batch_row) { to[row] = from[batch_row]; });
}

/// Of each row the first `to_width` of `from_width` columns.
template <typename T>
void ScatterTopK(const BatchPart& part, const std::vector<T>& from, size_t from_width,
                 std::vector<T>& to, size_t to_width) {
  part.ForEachRow([&](size_t row, size_t batch_row) {
    std::memcpy(to.data() + row * to_width, from.data() + batch_row * from_width,
                to_width * sizeof(T));
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
    result.segment_logprob.push_back(sum);
    result.segment_rows.push_back(rows);
    result.segment_greedy.push_back(static_cast<uint8_t>(greedy));
  }
}

}  // namespace

void PrepareResult(PendingRequest& pending, uint64_t weights_version) {
  const ScoreRequest& request = pending.request;
  const OutputSet outputs = EngineOutputs(request);
  const auto rows = static_cast<size_t>(request.rows);
  ScoreResult& result = pending.result;
  result.rows = request.rows;
  result.weights_version = weights_version;
  const auto size = [&](Output output, auto& values) {
    if (outputs.Has(output)) {
      values.resize(rows);
    }
  };
  size(Output::kLogprob, result.logprob);
  size(Output::kEntropy, result.entropy);
  size(Output::kLse, result.lse);
  size(Output::kArgmax, result.argmax_id);
  size(Output::kArgmax, result.argmax_logprob);
  size(Output::kGreedy, result.greedy);
  size(Output::kSumPSquared, result.sum_p_squared);
  size(Output::kMaxLogit, result.max_logit);
  size(Output::kMinLogit, result.min_logit);
  result.top_k_ids.resize(rows * static_cast<size_t>(request.top_k));
  result.top_k_logprobs.resize(rows * static_cast<size_t>(request.top_k));
  result.candidate_logprobs.resize(request.candidate_ids.size());
}

ScatteredPart ScatterPart(const BatchSlot& slot, const BatchPart& part) {
  const BatchSlot::Outputs& from = slot.outputs();
  const ScoreRequest& request = part.pending->request;
  ScoreResult& result = part.pending->result;
  ScatterColumn(part, from.logprob, result.logprob);
  ScatterColumn(part, from.entropy, result.entropy);
  ScatterColumn(part, from.lse, result.lse);
  ScatterColumn(part, from.argmax_id, result.argmax_id);
  ScatterColumn(part, from.argmax_logprob, result.argmax_logprob);
  ScatterColumn(part, from.sum_p_squared, result.sum_p_squared);
  ScatterColumn(part, from.max_logit, result.max_logit);
  ScatterColumn(part, from.min_logit, result.min_logit);
  if (!result.greedy.empty()) {
    part.ForEachRow([&](size_t row, size_t batch_row) {
      result.greedy[row] = static_cast<uint8_t>(from.argmax_id[batch_row] == request.targets[row]);
    });
  }
  if (request.top_k > 0) {
    const auto width = static_cast<size_t>(request.top_k);
    const auto batch_width = static_cast<size_t>(slot.top_k());
    ScatterTopK(part, from.top_k_ids, batch_width, result.top_k_ids, width);
    ScatterTopK(part, from.top_k_logprobs, batch_width, result.top_k_logprobs, width);
  }
  if (!request.candidate_ids.empty()) {
    auto candidate = static_cast<size_t>(part.first_candidate);
    part.ForEachRow([&](size_t row, size_t) {
      for (size_t i = request.candidate_offsets[row]; i < request.candidate_offsets[row + 1]; ++i) {
        result.candidate_logprobs[i] = from.candidate_logprobs[candidate++];
      }
    });
  }

  ScatteredPart scattered;
  const auto nonfinite =
      absl::MakeConstSpan(from.nonfinite)
          .subspan(static_cast<size_t>(part.batch_row), static_cast<size_t>(part.num_rows));
  scattered.nonfinite_rows =
      std::count_if(nonfinite.begin(), nonfinite.end(), [](uint8_t flag) { return flag != 0; });
  if (scattered.nonfinite_rows > 0) {
    bool found = false;
    part.ForEachRow([&](size_t row, size_t batch_row) {
      if (!found && from.nonfinite[batch_row] != 0) {
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
  if (!request.outputs().Has(Output::kLogprob)) {
    result.logprob.clear();
  }
  if (!request.outputs().Has(Output::kGreedy)) {
    result.greedy.clear();
  }
  result.ignored_rows = request.rows - pending.scored_rows;
  result.nonfinite_rows = pending.nonfinite_rows;
  result.stages = pending.stages;
  return std::move(result);
}

}  // namespace logprobd
