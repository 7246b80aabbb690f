#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/score.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// Counts of the comparison of the responses with each other.
struct AnswerChecks {
  int64_t nonfinite = 0;  ///< Answered rows whose requested logprob or entropy is NaN or Inf.
  int64_t compared = 0;   ///< Rows that were compared with the first response for the same row.
  /// Compared rows that differ in any bit. A response of another version of the weights counts as
  /// one.
  int64_t different = 0;
  std::string first_difference;  ///< Empty if there is none.
};

/// Stores the first response for each distinct row of a run. Every later response for the row must
/// be bit-identical, since a row's scores depend neither on the rest of its batch nor on the time.
/// Thread-safe.
class Baseline {
 public:
  explicit Baseline(int64_t distinct_rows);

  /// Compares a response for rows `first`, `first + 1`, ... of the pool, in cyclic order, with the
  /// first response for each row, or stores it if it is the first.
  void Add(int64_t first, const ScoreResult& result);

  /// Returns what was found until now.
  AnswerChecks checks() const;

 private:
  struct Entry {
    bool is_answered = false;
    float logprob = 0;    ///< NaN if it was not requested.
    float entropy = 0;    ///< NaN if it was not requested.
    uint64_t digest = 0;  ///< Digest of the bits of every output of the row.
  };

  mutable absl::Mutex mutex_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  AnswerChecks checks_ ABSL_GUARDED_BY(mutex_);
  std::optional<uint64_t> weights_version_ ABSL_GUARDED_BY(mutex_);
};

/// Results of `bench --verify`: the server's own comparison of its engine with double precision,
/// before and after the loads, and the comparison of the responses with each other.
struct Verification {
  VerifyReport before;
  VerifyReport after;
  AnswerChecks answers;

  /// Returns whether every check passed, and at least one row was compared.
  bool passed() const {
    return before.passed && after.passed && answers.nonfinite == 0 && answers.compared > 0 &&
           answers.different == 0;
  }
};

}  // namespace logprobd::client
