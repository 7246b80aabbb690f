#include "client/cli/bench/row_pool.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/cli/bench/schedule.h"

namespace logprobd::client {
namespace {

constexpr int64_t kDistinctElementsMax = int64_t{1} << 22;
/// Number of distinct rows to aim for, even if requests are smaller.
constexpr int64_t kDistinctRowsTarget = 256;

/// Writes `value` as an element of `dtype`. `element` may have any alignment.
void StoreElement(float value, Dtype dtype, std::byte* element) {
  if (dtype == Dtype::kF32) {
    std::memcpy(element, &value, sizeof(value));
    return;
  }
  const uint16_t half = dtype == Dtype::kBf16 ? ToBf16(value) : ToF16(value);
  std::memcpy(element, &half, sizeof(half));
}

}  // namespace

uint16_t ToBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

uint16_t ToF16(float value) {
  const auto sign = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16 & 0x8000);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7E00;
  if (magnitude >= 65520.0F) return sign | 0x7C00;
  // The value is scaled so that the unit in the last place of f16 is 1; nearbyint then rounds it to
  // nearest even.
  const int exponent = std::max(magnitude > 0 ? std::ilogb(magnitude) : -15, -14);
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  // The implicit leading bit adds 1 to the exponent field; a carry out of the fraction adds
  // another.
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(exponent + 14) << 10) + units));
}

absl::StatusOr<RowBuffer> AllocateHeapRows(int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  // Zeroing maps the pages before the first request is timed.
  std::shared_ptr<std::byte> memory(new (std::nothrow) std::byte[size](),
                                    std::default_delete<std::byte[]>());
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot allocate ", bytes, " bytes for rows: send fewer or smaller requests"));
  }
  absl::Span<std::byte> span(memory.get(), size);
  return RowBuffer(std::move(memory), span, /*is_shared=*/false);
}

absl::StatusOr<RowPool> RowPool::Create(const Head& head, Dtype dtype, int64_t rows_max,
                                        uint64_t seed) {
  RowPool pool;
  pool.hidden_size_ = head.hidden_size;
  pool.dtype_ = dtype;
  pool.distinct_rows_ =
      std::clamp<int64_t>(kDistinctElementsMax / std::max<int64_t>(head.hidden_size, 1), 1,
                          std::max(rows_max, kDistinctRowsTarget));
  const int64_t rows = std::max(rows_max, pool.distinct_rows_);
  absl::StatusOr<RowBuffer> hidden = AllocateHeapRows(rows * pool.row_bytes());
  if (!hidden.ok()) return hidden.status();
  pool.hidden_ = *std::move(hidden);

  Random random(seed);
  const auto vocab = static_cast<uint64_t>(std::max<int64_t>(head.vocab_size, 1));
  std::byte* element = pool.hidden_.bytes().data();
  for (int64_t row = 0; row < pool.distinct_rows_; ++row) {
    for (int64_t i = 0; i < head.hidden_size; ++i, element += DtypeBytes(dtype)) {
      StoreElement(random.Normal(), dtype, element);
    }
    pool.targets_.push_back(static_cast<int32_t>(random.Next() % vocab));
  }
  pool.targets_.resize(static_cast<size_t>(rows));
  const int64_t repeated = rows - pool.distinct_rows_;
  pool.Fill(
      0, repeated,
      pool.hidden_.bytes().subspan(static_cast<size_t>(pool.distinct_rows_ * pool.row_bytes())),
      absl::MakeSpan(pool.targets_).subspan(static_cast<size_t>(pool.distinct_rows_)));
  return pool;
}

std::vector<RowPool::Run> RowPool::Runs(int64_t first, int64_t rows) const {
  std::vector<Run> runs;
  int64_t begin = first % distinct_rows_;
  for (int64_t left = rows; left > 0;) {
    const int64_t count = std::min(left, distinct_rows_ - begin);
    runs.push_back({.begin = begin, .count = count});
    left -= count;
    begin = 0;
  }
  return runs;
}

void RowPool::Fill(int64_t first, int64_t rows, absl::Span<std::byte> hidden,
                   absl::Span<int32_t> targets) const {
  std::byte* destination = hidden.data();
  for (const Run& run : Runs(first, rows)) {
    const auto bytes = static_cast<size_t>(run.count * row_bytes());
    std::memcpy(destination, hidden_.bytes().data() + run.begin * row_bytes(), bytes);
    destination += bytes;
  }
  FillTargets(first, rows, targets);
}

void RowPool::FillTargets(int64_t first, int64_t rows, absl::Span<int32_t> targets) const {
  auto destination = targets.begin();
  for (const Run& run : Runs(first, rows)) {
    destination = std::copy_n(targets_.begin() + run.begin, run.count, destination);
  }
}

}  // namespace logprobd::client
