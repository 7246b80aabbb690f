#include "client/cli/bench/row_pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "client/cli/bench/float_formats.h"
#include "client/cli/bench/random.h"

namespace logprobd::client {
namespace {

constexpr int64_t kDistinctElementsMax = int64_t{1} << 22;
/// Small requests draw from at least this many rows.
constexpr int64_t kDistinctRowsWanted = 256;

}  // namespace

absl::StatusOr<RowPool> RowPool::Create(const Head& head, Dtype dtype, int64_t rows_max,
                                        uint64_t seed, RowMemory& memory) {
  RowPool pool;
  pool.hidden_size_ = head.hidden_size;
  pool.dtype_ = dtype;
  pool.distinct_rows_ =
      std::clamp<int64_t>(kDistinctElementsMax / std::max<int64_t>(head.hidden_size, 1), 1,
                          std::max(rows_max, kDistinctRowsWanted));
  const int64_t rows = std::max(rows_max, pool.distinct_rows_);
  absl::StatusOr<RowBuffer> hidden = memory.Allocate(rows * pool.row_bytes());
  if (!hidden.ok()) return hidden.status();
  pool.hidden_ = *std::move(hidden);

  Random random(seed);
  const auto vocab = static_cast<uint64_t>(std::max<int64_t>(head.vocab_size, 1));
  std::byte* place = pool.hidden_.bytes().data();
  for (int64_t row = 0; row < pool.distinct_rows_; ++row) {
    for (int64_t i = 0; i < head.hidden_size; ++i, place += DtypeBytes(dtype)) {
      StoreElement(random.Normal(), dtype, place);
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
  std::byte* place = hidden.data();
  for (const Run& run : Runs(first, rows)) {
    const auto bytes = static_cast<size_t>(run.count * row_bytes());
    std::memcpy(place, hidden_.bytes().data() + run.begin * row_bytes(), bytes);
    place += bytes;
  }
  FillTargets(first, rows, targets);
}

void RowPool::FillTargets(int64_t first, int64_t rows, absl::Span<int32_t> targets) const {
  auto place = targets.begin();
  for (const Run& run : Runs(first, rows)) {
    place = std::copy_n(targets_.begin() + run.begin, run.count, place);
  }
}

}  // namespace logprobd::client
