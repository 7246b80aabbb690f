#include "server/weights/pushed_weights.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/base/text.h"
#include "server/weights/widen.h"

namespace logprobd {
namespace {

std::unique_ptr<std::byte[]> Allocate(int64_t bytes) {
  return std::unique_ptr<std::byte[]>(new (std::nothrow) std::byte[static_cast<size_t>(bytes)]);
}

}  // namespace

absl::StatusOr<std::shared_ptr<PushedWeights>> PushedWeights::Create(HeadInfo info) {
  std::shared_ptr<PushedWeights> weights(new PushedWeights(std::move(info)));
  const HeadInfo& head = weights->info_;
  Tensor& rows = weights->rows_;
  rows.row_bytes = head.hidden_size * DtypeBytes(head.dtype);
  rows.num_rows = head.vocab_rows;
  rows.bytes = Allocate(rows.row_bytes * rows.num_rows);
  Tensor& bias = weights->bias_;
  bias.row_bytes = DtypeBytes(head.dtype);
  bias.num_rows = head.has_bias ? head.vocab_rows : 0;
  bias.bytes = Allocate(bias.row_bytes * bias.num_rows);
  if (rows.bytes == nullptr || bias.bytes == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("the system refuses ",
                                                     HumanBytes(rows.row_bytes * rows.num_rows),
                                                     " of host memory for the rows"));
  }
  return weights;
}

absl::Status PushedWeights::Tensor::Add(int64_t row_begin, int64_t num_added,
                                        absl::Span<const std::byte> added) {
  if (row_begin < 0 || num_added < 1 || row_begin > num_rows || num_added > num_rows - row_begin) {
    return absl::InvalidArgumentError(absl::StrCat("rows: ", num_added, " from row ", row_begin,
                                                   ", must be rows of [0, ", num_rows, ")"));
  }
  if (static_cast<int64_t>(added.size()) != num_added * row_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("rows: ", num_added, " have ",
                                                   num_added * row_bytes, " bytes, but ",
                                                   added.size(), " were sent"));
  }
  const int64_t row_end = row_begin + num_added;
  for (int64_t row = row_begin; row < row_end;) {
    const auto next = received.upper_bound(row);
    const bool is_received = next != received.begin() && std::prev(next)->second > row;
    int64_t end = row_end;
    if (is_received) {
      end = std::min(end, std::prev(next)->second);
    } else if (next != received.end()) {
      end = std::min(end, next->first);
    }
    std::byte* const kept = bytes.get() + row * row_bytes;
    const std::byte* const sent = added.data() + (row - row_begin) * row_bytes;
    const auto size = static_cast<size_t>((end - row) * row_bytes);
    if (!is_received) {
      std::memcpy(kept, sent, size);
    } else if (std::memcmp(kept, sent, size) != 0) {
      return absl::DataLossError(
          absl::StrCat("rows ", row, " to ", end, " differ from those that were received before"));
    }
    row = end;
  }
  // Joins the range with those that it touches.
  int64_t begin = row_begin;
  int64_t end = row_end;
  auto range = received.upper_bound(row_begin);
  if (range != received.begin() && std::prev(range)->second >= row_begin) {
    --range;
  }
  while (range != received.end() && range->first <= row_end) {
    begin = std::min(begin, range->first);
    end = std::max(end, range->second);
    range = received.erase(range);
  }
  received[begin] = end;
  return absl::OkStatus();
}

int64_t PushedWeights::Tensor::rows_received() const {
  int64_t rows = 0;
  for (const auto& [begin, end] : received) {
    rows += end - begin;
  }
  return rows;
}

absl::Status PushedWeights::AddRows(int64_t row_begin, int64_t num_rows,
                                    absl::Span<const std::byte> bytes) {
  const absl::MutexLock lock(&mutex_);
  return rows_.Add(row_begin, num_rows, bytes);
}

absl::Status PushedWeights::AddBias(int64_t row_begin, int64_t num_rows,
                                    absl::Span<const std::byte> bytes) {
  if (!info_.has_bias) {
    return absl::InvalidArgumentError("is_bias: the live version has no bias");
  }
  const absl::MutexLock lock(&mutex_);
  LOGPROBD_RETURN_IF_ERROR(WithContext(bias_.Add(row_begin, num_rows, bytes), "bias"));
  if (bias_values_.empty() && bias_.rows_received() == bias_.num_rows) {
    bias_values_ = Widen(stored_bias(), info_.dtype);
  }
  return absl::OkStatus();
}

int64_t PushedWeights::rows_received() const {
  const absl::MutexLock lock(&mutex_);
  return rows_.rows_received();
}

bool PushedWeights::is_complete() const {
  const absl::MutexLock lock(&mutex_);
  return rows_.rows_received() == rows_.num_rows && bias_.rows_received() == bias_.num_rows;
}

absl::Span<const std::byte> PushedWeights::stored_bias() const {
  return {bias_.bytes.get(), static_cast<size_t>(bias_.row_bytes * bias_.num_rows)};
}

absl::Status PushedWeights::ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                                     int64_t row_pitch_bytes) const {
  if (row_begin < 0 || row_end < row_begin || row_end > rows_.num_rows) {
    return absl::OutOfRangeError(absl::StrCat("rows ", row_begin, " to ", row_end,
                                              " are outside the pushed weight, which has ",
                                              rows_.num_rows, " rows"));
  }
  for (int64_t row = row_begin; row < row_end; ++row) {
    std::memcpy(out + (row - row_begin) * row_pitch_bytes,
                rows_.bytes.get() + row * rows_.row_bytes, static_cast<size_t>(rows_.row_bytes));
  }
  return absl::OkStatus();
}

}  // namespace logprobd
