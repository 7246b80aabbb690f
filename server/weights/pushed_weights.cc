#include "server/weights/pushed_weights.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/base/text.h"
#include "server/weights/widen.h"

namespace logprobd {
namespace {

/// Returns memory of which every page has been written to, or null.
std::unique_ptr<std::byte[]> Allocate(int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  std::unique_ptr<std::byte[]> memory(new (std::nothrow) std::byte[size]);
  if (memory != nullptr) std::memset(memory.get(), 0, size);
  return memory;
}

size_t BytesOf(const PushedRows& sent) {
  size_t bytes = 0;
  for (const absl::Span<const std::byte> piece : sent.pieces) bytes += piece.size();
  return bytes;
}

/// Begins the messages about rows of `sent`.
absl::string_view PrefixOf(const PushedRows& sent) { return sent.is_bias ? "bias: " : ""; }

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

absl::Status PushedWeights::Tensor::Check(const PushedRows& sent) const {
  if (sent.row_begin < 0 || sent.num_rows < 1 || sent.row_begin > num_rows ||
      sent.num_rows > num_rows - sent.row_begin) {
    return absl::InvalidArgumentError(absl::StrCat(PrefixOf(sent), "rows: ", sent.num_rows,
                                                   " from row ", sent.row_begin,
                                                   ", must be rows of [0, ", num_rows, ")"));
  }
  if (const auto bytes_sent = static_cast<int64_t>(BytesOf(sent));
      bytes_sent != sent.num_rows * row_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(PrefixOf(sent), "rows: ", sent.num_rows,
                                                   " have ", sent.num_rows * row_bytes,
                                                   " bytes, but ", bytes_sent, " were sent"));
  }
  return absl::OkStatus();
}

std::vector<PushedWeights::Range> PushedWeights::Tensor::Cut(int64_t begin, int64_t end) const {
  std::vector<Range> ranges;
  while (begin < end) {
    const auto next = received.upper_bound(begin);
    Range range{.begin = begin, .end = end};
    range.is_received = next != received.begin() && std::prev(next)->second > begin;
    if (range.is_received) {
      range.end = std::min(end, std::prev(next)->second);
    } else if (next != received.end()) {
      range.end = std::min(end, next->first);
    }
    ranges.push_back(range);
    begin = range.end;
  }
  return ranges;
}

template <typename Use>
bool PushedWeights::Tensor::UseRows(const PushedRows& sent, const Range& range,
                                    const Use& use) const {
  const int64_t begin = (range.begin - sent.row_begin) * row_bytes;
  const int64_t end = (range.end - sent.row_begin) * row_bytes;
  int64_t position = 0;
  for (const absl::Span<const std::byte> piece : sent.pieces) {
    const auto piece_bytes = static_cast<int64_t>(piece.size());
    const int64_t first = std::max(begin, position);
    const int64_t last = std::min(end, position + piece_bytes);
    if (first < last && !use(piece.subspan(static_cast<size_t>(first - position),
                                           static_cast<size_t>(last - first)),
                             first - begin)) {
      return false;
    }
    position += piece_bytes;
  }
  return true;
}

absl::Status PushedWeights::Tensor::Compare(const PushedRows& sent,
                                            const std::vector<Range>& ranges) const {
  for (const Range& range : ranges) {
    const auto is_same = [&](absl::Span<const std::byte> piece, int64_t offset) {
      return std::memcmp(bytes.get() + range.begin * row_bytes + offset, piece.data(),
                         piece.size()) == 0;
    };
    if (range.is_received && !UseRows(sent, range, is_same)) {
      return absl::DataLossError(absl::StrCat(PrefixOf(sent), "rows ", range.begin, " to ",
                                              range.end,
                                              " differ from those that were received before"));
    }
  }
  return absl::OkStatus();
}

bool PushedWeights::Tensor::IsCopying(int64_t begin, int64_t end) const {
  return std::any_of(copying.begin(), copying.end(),
                     [&](const auto& range) { return range.first < end && range.second > begin; });
}

void PushedWeights::Tensor::Receive(int64_t begin, int64_t end) {
  auto range = received.upper_bound(begin);
  if (range != received.begin() && std::prev(range)->second >= begin) --range;
  while (range != received.end() && range->first <= end) {
    begin = std::min(begin, range->first);
    end = std::max(end, range->second);
    range = received.erase(range);
  }
  received[begin] = end;
}

int64_t PushedWeights::Tensor::rows_received() const {
  int64_t rows = 0;
  for (const auto& [begin, end] : received) rows += end - begin;
  return rows;
}

absl::Status PushedWeights::Check(const PushedRows& sent) const {
  return sent.is_bias && !info_.has_bias
             ? absl::InvalidArgumentError("is_bias: the live version has no bias")
             : TensorOf(sent).Check(sent);
}

absl::Status PushedWeights::Add(const PushedRows& sent) {
  LOGPROBD_RETURN_IF_ERROR(Check(sent));
  Tensor& tensor = sent.is_bias ? bias_ : rows_;
  const int64_t end = sent.row_begin + sent.num_rows;
  std::vector<Range> ranges;
  {
    const absl::MutexLock lock(&mutex_);
    const auto is_free = [&] { return !tensor.IsCopying(sent.row_begin, end); };
    mutex_.Await(absl::Condition(&is_free));
    ranges = tensor.Cut(sent.row_begin, end);
    tensor.copying[sent.row_begin] = end;
  }
  // Calls copy at the same time, because only this one writes to these rows.
  const absl::Status compared = tensor.Compare(sent, ranges);
  for (const Range& range : ranges) {
    if (compared.ok() && !range.is_received) {
      std::byte* const rows = tensor.bytes.get() + range.begin * tensor.row_bytes;
      tensor.UseRows(sent, range, [rows](absl::Span<const std::byte> piece, int64_t offset) {
        std::memcpy(rows + offset, piece.data(), piece.size());
        return true;
      });
    }
  }
  const absl::MutexLock lock(&mutex_);
  tensor.copying.erase(sent.row_begin);
  LOGPROBD_RETURN_IF_ERROR(compared);
  tensor.Receive(sent.row_begin, end);
  if (sent.is_bias && bias_values_.empty() && bias_.rows_received() == bias_.num_rows) {
    bias_values_ = Widen(stored_bias(), info_.dtype);
  }
  return absl::OkStatus();
}

absl::Status PushedWeights::Compare(const PushedRows& sent) const {
  LOGPROBD_RETURN_IF_ERROR(Check(sent));
  const Tensor& tensor = TensorOf(sent);
  std::vector<Range> ranges;
  {
    const absl::MutexLock lock(&mutex_);
    ranges = tensor.Cut(sent.row_begin, sent.row_begin + sent.num_rows);
  }
  return tensor.Compare(sent, ranges);
}

PushedVersion PushedWeights::progress() const {
  const absl::MutexLock lock(&mutex_);
  return {.version = info_.weights_version,
          .rows = rows_.rows_received(),
          .vocab_rows = info_.vocab_rows};
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
