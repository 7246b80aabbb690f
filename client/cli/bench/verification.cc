#include "client/cli/bench/verification.h"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace logprobd::client {
namespace {

/// Adds `bits` to a digest. The digests are compared within one process only.
uint64_t Mix(uint64_t digest, uint64_t bits) {
  digest = (digest ^ bits) * 0x9E3779B97F4A7C15;
  return digest ^ digest >> 32;
}

template <typename T>
uint64_t MixRow(uint64_t digest, const std::vector<T>& values, size_t row, size_t per_row = 1) {
  if (values.empty()) return digest;
  for (size_t i = row * per_row; i < (row + 1) * per_row; ++i) {
    uint64_t bits = 0;
    std::memcpy(&bits, &values[i], sizeof(T));
    digest = Mix(digest, bits);
  }
  return digest;
}

/// Returns whether a row's value was requested and is NaN or infinite.
bool IsNonfinite(const std::vector<float>& values, size_t row) {
  return !values.empty() && !std::isfinite(values[row]);
}

/// Returns a row's value, or NaN if the output was not requested.
float ValueOf(const std::vector<float>& values, size_t row) {
  return values.empty() ? std::numeric_limits<float>::quiet_NaN() : values[row];
}

uint64_t DigestOf(const ScoreResult& result, size_t row) {
  const auto top_k = static_cast<size_t>(result.top_k);
  uint64_t digest = 0;
  ForEachScoreColumn([&](const auto& column) {
    if (column.shape == ColumnShape::kRow || column.shape == ColumnShape::kTopK) {
      const size_t width = column.shape == ColumnShape::kTopK ? top_k : 1;
      digest = MixRow(digest, result.*column.values, row, width);
    }
  });
  return digest;
}

}  // namespace

Baseline::Baseline(int64_t distinct_rows) : entries_(static_cast<size_t>(distinct_rows)) {}

void Baseline::Add(int64_t first, const ScoreResult& result) {
  const auto rows = static_cast<size_t>(result.rows);
  std::vector<uint64_t> digests(rows);
  for (size_t row = 0; row < rows; ++row) digests[row] = DigestOf(result, row);

  const absl::MutexLock lock(&mutex_);
  if (!weights_version_.has_value()) weights_version_ = result.weights_version;
  if (*weights_version_ != result.weights_version) {
    // Other weights give other scores, so this difference is no error of the server.
    ++checks_.different;
    if (checks_.first_difference.empty()) {
      checks_.first_difference = absl::StrCat(
          "the weights changed from version ", *weights_version_, " to ", result.weights_version,
          " during the run: repeat the run without such a change");
    }
    return;
  }
  for (size_t row = 0; row < rows; ++row) {
    if (IsNonfinite(result.logprob, row) || IsNonfinite(result.entropy, row)) ++checks_.nonfinite;
    const size_t pool_row = (static_cast<size_t>(first) + row) % entries_.size();
    Entry& entry = entries_[pool_row];
    const Entry found = {.is_answered = true,
                         .logprob = ValueOf(result.logprob, row),
                         .entropy = ValueOf(result.entropy, row),
                         .digest = digests[row]};
    if (!entry.is_answered) {
      entry = found;
      continue;
    }
    ++checks_.compared;
    if (entry.digest == found.digest) continue;
    ++checks_.different;
    if (checks_.first_difference.empty()) {
      checks_.first_difference = absl::StrFormat(
          "row %d of the load, in a request of %d rows, has logprob %.9g and entropy %.9g; the "
          "first response for this row had logprob %.9g and entropy %.9g",
          pool_row, rows, found.logprob, found.entropy, entry.logprob, entry.entropy);
    }
  }
}

AnswerChecks Baseline::checks() const {
  const absl::MutexLock lock(&mutex_);
  return checks_;
}

}  // namespace logprobd::client
