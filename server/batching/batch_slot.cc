#include "server/batching/batch_slot.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/types/span.h"

namespace logprobd {
namespace {

template <typename T>
absl::Span<T> Range(std::vector<T>& values, int64_t begin, int64_t end) {
  if (values.empty()) return {};
  return absl::MakeSpan(values).subspan(static_cast<size_t>(begin),
                                        static_cast<size_t>(end - begin));
}

float RowTemperature(const ScoreRequest& request, size_t row) {
  return request.row_temperatures.empty() ? request.temperature.value_or(1.0F)
                                          : request.row_temperatures[row];
}

}  // namespace

void BatchSlot::Fill(std::vector<BatchPart> parts, int64_t hidden_size, bool reads_in_place) {
  parts_ = std::move(parts);
  dtype_ = parts_.front().pending->request.dtype();
  row_bytes_ = hidden_size * DtypeBytes(dtype_);
  runs_.Clear();
  if (reads_in_place) runs_.Place(absl::MakeSpan(parts_), row_bytes_, staging_->data());
  num_rows_ = 0;
  outputs_ = OutputSet();
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
    outputs_ = outputs_.Union(request.computed_outputs());
    top_k_ = std::max(top_k_, static_cast<int32_t>(request.top_k));
    has_entropy_temperature = has_entropy_temperature || request.entropy_temperature.has_value();
    AppendRows(part);
    AppendCandidates(part);
  }
  if (has_entropy_temperature) {
    for (const BatchPart& part : parts_) AppendEntropyTemperatures(part);
  }
  SizeScores();
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
  if (request.candidate_ids.empty()) return;
  part.ForEachRow([&](size_t row, size_t batch_row) {
    for (size_t i = request.candidate_offsets[row]; i < request.candidate_offsets[row + 1]; ++i) {
      candidate_rows_.push_back(static_cast<int32_t>(batch_row));
      candidate_ids_.push_back(request.candidate_ids[i]);
    }
  });
}

void BatchSlot::SizeScores() {
  const ColumnCounts counts = CountsBefore(num_rows_);
  ForEachOutputColumn([&](const auto& column) {
    // Unneeded columns keep their memory for later batches.
    const int64_t size = column.IsScored(outputs_) ? counts.Of(column.shape) : 0;
    (scores_.*column.values).resize(static_cast<size_t>(size));
  });
  nonfinite_.resize(static_cast<size_t>(num_rows_));
}

ColumnCounts BatchSlot::CountsBefore(int64_t row) const {
  // The candidates are sorted by row.
  const auto candidates = std::lower_bound(candidate_rows_.begin(), candidate_rows_.end(), row);
  return {.rows = row, .top_k = top_k_, .candidates = candidates - candidate_rows_.begin()};
}

void BatchSlot::SetRange(int64_t row_begin, int64_t row_end) {
  range_begin_ = row_begin;
  range_end_ = row_end;
  const ColumnCounts begin = CountsBefore(row_begin);
  const ColumnCounts end = CountsBefore(row_end);
  batch_ = ScoreBatch();
  batch_.dtype = dtype_;
  batch_.num_rows = row_end - row_begin;
  batch_.hidden = staging_->data();
  batch_.runs = runs_.Of(row_begin, row_end);
  batch_.targets = Range(targets_, row_begin, row_end);
  batch_.temperatures = Range(temperatures_, row_begin, row_end);
  batch_.entropy_temperatures = Range(entropy_temperatures_, row_begin, row_end);
  batch_.outputs = outputs_;
  batch_.top_k = top_k_;
  batch_.candidate_rows = Range(candidate_rows_, begin.candidates, end.candidates);
  batch_.candidate_ids = Range(candidate_ids_, begin.candidates, end.candidates);
  ForEachOutputColumn([&](const auto& column) {
    if (column.is_from_engine()) {
      batch_.*column.span =
          Range(scores_.*column.values, begin.Of(column.shape), end.Of(column.shape));
    }
  });
  batch_.nonfinite = Range(nonfinite_, row_begin, row_end);
}

int64_t BatchSlot::array_bytes() const {
  size_t bytes = 0;
  const auto add = [&bytes](const auto&... arrays) {
    ((bytes += arrays.capacity() * sizeof(arrays[0])), ...);
  };
  add(targets_, temperatures_, entropy_temperatures_, candidate_rows_, candidate_ids_, nonfinite_);
  ForEachOutputColumn([&](const auto& column) { add(scores_.*column.values); });
  return static_cast<int64_t>(bytes);
}

void BatchSlot::ReleaseLargeArrays() {
  const auto release = [](auto& array) {
    if (static_cast<int64_t>(array.capacity() * sizeof(array[0])) > kKeptArrayBytes) {
      array = {};
      array.shrink_to_fit();
    }
  };
  release(candidate_rows_);
  release(candidate_ids_);
  ForEachOutputColumn([&](const auto& column) {
    // Columns with one element per row are bounded by the largest batch.
    if (column.shape != ColumnShape::kRow) release(scores_.*column.values);
  });
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
  // there. If there are runs, they already point to the rows in memory.
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
