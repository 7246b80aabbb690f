#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/score.h"

namespace logprobd::client {

/// The first answer to every distinct row of a run, against which all later ones are compared bit
/// by bit: a row's scores depend neither on what is scored beside it nor on when. Thread-safe.
class Baseline {
 public:
  struct Answer {
    int64_t row = 0;  ///< Of the pool.
    float logprob = 0;
    float entropy = 0;
  };

  explicit Baseline(int64_t distinct_rows);

  /// Takes an answer to rows `first`, `first + 1`, ... (in a circle); both logprob and entropy were
  /// asked for.
  void Add(int64_t first, const ScoreResult& result);

  /// Answers compared with an earlier one of the same row.
  int64_t rows_compared() const;
  /// Those that had other bits.
  int64_t rows_different() const;
  /// What the first of them was; empty when there is none.
  std::string first_difference() const;
  uint64_t weights_version() const;

  /// The answers of up to `count` rows, spread over those that were answered.
  std::vector<Answer> Sample(int64_t count) const;

 private:
  struct Entry {
    bool is_answered = false;
    float logprob = 0;
    float entropy = 0;
    uint64_t digest = 0;  ///< Of the bits of every output of the row.
  };

  mutable absl::Mutex mutex_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  int64_t compared_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t different_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string first_difference_ ABSL_GUARDED_BY(mutex_);
  std::optional<uint64_t> weights_version_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd::client
