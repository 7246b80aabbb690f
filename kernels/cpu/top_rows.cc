#include "kernels/cpu/top_rows.h"

#include <algorithm>
#include <limits>

namespace logprobd::kernels {
namespace {

bool Better(const TopRows::Entry& a, const TopRows::Entry& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

}  // namespace

TopRows::TopRows(int64_t rows_max, int32_t top_k_max)
    : entries_(static_cast<size_t>(rows_max * top_k_max)),
      counts_(static_cast<size_t>(rows_max)),
      thresholds_(std::make_unique<std::atomic<float>[]>(static_cast<size_t>(rows_max))),
      locks_(std::make_unique<std::atomic_flag[]>(static_cast<size_t>(rows_max))) {}

void TopRows::Reset(int64_t num_rows, int32_t top_k) {
  top_k_ = top_k;
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto i = static_cast<size_t>(row);
    counts_[i] = 0;
    thresholds_[i].store(-std::numeric_limits<float>::infinity(), std::memory_order_relaxed);
  }
}

void TopRows::Offer(int64_t row, const float* logits, float max_logit, int32_t first_column,
                    int32_t num_columns) {
  const auto i = static_cast<size_t>(row);
  if (max_logit < thresholds_[i].load(std::memory_order_relaxed)) return;
  while (locks_[i].test_and_set(std::memory_order_acquire)) {
    while (locks_[i].test(std::memory_order_relaxed)) {
    }
  }
  Entry* entries = &entries_[static_cast<size_t>(row * top_k_)];
  int32_t count = counts_[i];
  float threshold = thresholds_[i].load(std::memory_order_relaxed);
  for (int32_t column = 0; column < num_columns; ++column) {
    if (!(logits[column] >= threshold)) continue;
    const Entry entry = {logits[column], first_column + column};
    if (count == top_k_ && !Better(entry, entries[count - 1])) continue;
    Entry* place = std::lower_bound(entries, entries + count, entry, Better);
    Entry* end = entries + std::min(count, top_k_ - 1);
    std::move_backward(place, end, end + 1);
    *place = entry;
    count = std::min(count + 1, top_k_);
    if (count == top_k_) threshold = entries[count - 1].logit;
  }
  counts_[i] = count;
  thresholds_[i].store(threshold, std::memory_order_relaxed);
  locks_[i].clear(std::memory_order_release);
}

}  // namespace logprobd::kernels
