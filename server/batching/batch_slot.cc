#include "server/batching/batch_slot.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/types/span.h"

namespace logprobd {
namespace {

template <typename T>
absl::Span<T> Range(std::vector<T>& values, int64_t begin, int64_t end) {
  if (values.empty()) {
    return {};
  }
  return absl::MakeSpan(values).subspan(static_cast<size_t>(begin),
                                        static_cast<size_t>(end - begin));
}

/// Resizes an output to `count` elements if it is requested, otherwise to none. Memory is kept.
template <typename T>
void Size(std::vector<T>& values, bool wanted, int64_t count) {
  values.resize(wanted ? static_cast<size_t>(count) : 0);
}

float RowTemperature(const ScoreRequest& request, size_t row) {
  return request.row_temperatures.empty() ? request.temperature.value_or(1.0F)
                                          : request.row_temperatures[row];
}

}  // namespace

OutputSet EngineOutputs(const ScoreRequest& request) {
  const OutputSet outputs = request.outputs();
  return request.segment_offsets.empty() ? outputs
                                         : outputs.With(Output::kLogprob).With(Output::kGreedy);
}

void BatchSlot::Fill(std::vector<BatchPart> parts, int64_t hidden_size, bool reads_in_place) {
  parts_ = std::move(parts);
  dtype_ = parts_.front().pending->request.dtype();
  row_bytes_ = hidden_size * DtypeBytes(dtype_);
  runs_.Clear();
  if (reads_in_place) {
    runs_.Place(absl::MakeSpan(parts_), row_bytes_, staging_->data());
  }
  num_rows_ = 0;
  wanted_ = OutputSet();
  top_k_ = 0;
  targets_.clear();
  temperatures_.clear();
  entropy_temperatures_.clear();
  candidate_rows_.clear();
  candidate_ids_.clear();
  bool has_entropy_temperature = false;
  for (BatchPart& part : parts_) {
    const ScoreRequest& request = part.pending->request;
    num_rows_ += part.num_rows;
    wanted_ = wanted_.Union(EngineOutputs(request));
    top_k_ = std::max(top_k_, static_cast<int32_t>(request.top_k));
    has_entropy_temperature = has_entropy_temperature || request.entropy_temperature.has_value();
    AppendRows(part);
    AppendCandidates(part);
  }
  if (has_entropy_temperature) {
    for (const BatchPart& part : parts_) {
      AppendEntropyTemperatures(part);
    }
  }
  SizeOutputs();
  is_halved_ = false;
  middle_ = 0;
  first_status_ = absl::OkStatus();
  last_status_ = absl::OkStatus();
  SetRange(0, num_rows_);
}

void BatchSlot::AppendRows(const BatchPart& part) {
  const ScoreRequest& request = part.pending->request;
  part.ForEachRow([&](size_t row, size_t) {
    targets_.push_back(request.targets[row]);
    temperatures_.push_back(RowTemperature(request, row));
  });
}

void BatchSlot::AppendEntropyTemperatures(const BatchPart& part) {
  const ScoreRequest& request = part.pending->request;
  part.ForEachRow([&](size_t row, size_t) {
    entropy_temperatures_.push_back(
        request.entropy_temperature.value_or(RowTemperature(request, row)));
  });
}

void BatchSlot::AppendCandidates(BatchPart& part) {
  part.first_candidate = static_cast<int64_t>(candidate_ids_.size());
  const ScoreRequest& request = part.pending->request;
  if (request.candidate_ids.empty()) {
    return;
  }
  part.ForEachRow([&](size_t row, size_t batch_row) {
    for (size_t i = request.candidate_offsets[row]; i < request.candidate_offsets[row + 1]; ++i) {
      candidate_rows_.push_back(static_cast<int32_t>(batch_row));
      candidate_ids_.push_back(request.candidate_ids[i]);
    }
  });
}

void BatchSlot::SizeOutputs() {
  const int64_t rows = num_rows_;
  Size(outputs_.logprob, wanted_.Has(Output::kLogprob), rows);
  Size(outputs_.entropy, wanted_.Has(Output::kEntropy), rows);
  Size(outputs_.lse, wanted_.Has(Output::kLse), rows);
  Size(outputs_.argmax_id, wanted_.Has(Output::kArgmax) || wanted_.Has(Output::kGreedy), rows);
  Size(outputs_.argmax_logprob, wanted_.Has(Output::kArgmax), rows);
  Size(outputs_.sum_p_squared, wanted_.Has(Output::kSumPSquared), rows);
  Size(outputs_.max_logit, wanted_.Has(Output::kMaxLogit), rows);
  Size(outputs_.min_logit, wanted_.Has(Output::kMinLogit), rows);
  Size(outputs_.top_k_ids, top_k_ > 0, rows * top_k_);
  Size(outputs_.top_k_logprobs, top_k_ > 0, rows * top_k_);
  outputs_.candidate_logprobs.resize(candidate_ids_.size());
  outputs_.nonfinite.resize(static_cast<size_t>(rows));
}

void BatchSlot::SetRange(int64_t row_begin, int64_t row_end) {
  range_begin_ = row_begin;
  range_end_ = row_end;
  // The candidates are sorted by row.
  const auto candidates_below = [&](int64_t row) {
    return std::lower_bound(candidate_rows_.begin(), candidate_rows_.end(), row) -
           candidate_rows_.begin();
  };
  const int64_t candidates_begin = candidates_below(row_begin);
  const int64_t candidates_end = candidates_below(row_end);
  batch_ = ScoreBatch();
  batch_.dtype = dtype_;
  batch_.num_rows = row_end - row_begin;
  batch_.hidden = staging_->data();
  batch_.runs = runs_.Of(row_begin, row_end);
  batch_.targets = Range(targets_, row_begin, row_end);
  batch_.temperatures = Range(temperatures_, row_begin, row_end);
  batch_.entropy_temperatures = Range(entropy_temperatures_, row_begin, row_end);
  batch_.outputs = wanted_;
  batch_.top_k = top_k_;
  batch_.candidate_rows = Range(candidate_rows_, candidates_begin, candidates_end);
  batch_.candidate_ids = Range(candidate_ids_, candidates_begin, candidates_end);
  batch_.logprob = Range(outputs_.logprob, row_begin, row_end);
  batch_.entropy = Range(outputs_.entropy, row_begin, row_end);
  batch_.lse = Range(outputs_.lse, row_begin, row_end);
  batch_.argmax_id = Range(outputs_.argmax_id, row_begin, row_end);
  batch_.argmax_logprob = Range(outputs_.argmax_logprob, row_begin, row_end);
  batch_.sum_p_squared = Range(outputs_.sum_p_squared, row_begin, row_end);
  batch_.max_logit = Range(outputs_.max_logit, row_begin, row_end);
  batch_.min_logit = Range(outputs_.min_logit, row_begin, row_end);
  batch_.top_k_ids = Range(outputs_.top_k_ids, row_begin * top_k_, row_end * top_k_);
  batch_.top_k_logprobs = Range(outputs_.top_k_logprobs, row_begin * top_k_, row_end * top_k_);
  batch_.candidate_logprobs = Range(outputs_.candidate_logprobs, candidates_begin, candidates_end);
  batch_.nonfinite = Range(outputs_.nonfinite, row_begin, row_end);
}

int64_t BatchSlot::array_bytes() const {
  size_t bytes = 0;
  const auto add = [&bytes](const auto&... arrays) {
    ((bytes += arrays.capacity() * sizeof(arrays[0])), ...);
  };
  add(targets_, temperatures_, entropy_temperatures_, candidate_rows_, candidate_ids_);
  const Outputs& out = outputs_;
  add(out.logprob, out.entropy, out.lse, out.argmax_id, out.argmax_logprob, out.sum_p_squared,
      out.max_logit, out.min_logit, out.top_k_ids, out.top_k_logprobs, out.candidate_logprobs,
      out.nonfinite);
  return static_cast<int64_t>(bytes);
}

void BatchSlot::ReleaseLargeArrays() {
  const auto release = [](auto&... arrays) {
    const auto release_one = [](auto& array) {
      if (static_cast<int64_t>(array.capacity() * sizeof(array[0])) > kKeptArrayBytes) {
        array = {};
        array.shrink_to_fit();
      }
    };
    (release_one(arrays), ...);
  };
  // All other arrays have one element per row.
  release(candidate_rows_, candidate_ids_, outputs_.candidate_logprobs, outputs_.top_k_ids,
          outputs_.top_k_logprobs);
  batch_ = ScoreBatch();
}

void BatchSlot::Halve() {
  is_halved_ = true;
  middle_ = num_rows_ / 2;
  SetRange(0, middle_);
}

bool BatchSlot::NextHalf(const absl::Status& status) {
  if (!is_halved_ || range_begin_ > 0) {
    last_status_ = status;
    return false;
  }
  first_status_ = status;
  // A batch must begin at the start of its staging buffer, and its candidates count rows from
  // there. Runs already point to the rows in memory.
  if (runs_.empty()) {
    std::memmove(staging_->data(), staging_->data() + middle_ * row_bytes_,
                 static_cast<size_t>((num_rows_ - middle_) * row_bytes_));
  }
  SetRange(middle_, num_rows_);
  for (int32_t& row :
       Range(candidate_rows_,
             static_cast<int64_t>(candidate_rows_.size() - batch_.candidate_rows.size()),
             static_cast<int64_t>(candidate_rows_.size()))) {
    row -= static_cast<int32_t>(middle_);
  }
  return true;
}

const absl::Status& BatchSlot::StatusOf(const BatchPart& part) const {
  const bool reaches_first = part.batch_row < middle_;
  return reaches_first && !first_status_.ok()       ? first_status_
         : part.batch_row + part.num_rows > middle_ ? last_status_
                                                    : first_status_;
}

}  // namespace logprobd
