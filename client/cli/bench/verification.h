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

/// Stores the first response for each distinct row of a run. Every later response for the row must
/// be bit-identical, since a row's scores depend neither on the rest of its batch nor on the time.
/// Thread-safe.
class Baseline {
 public:
  explicit Baseline(int64_t distinct_rows);

  /// Compares a response for rows `first`, `first + 1`, ... of the pool, in cyclic order, with the
  /// first response for each row, or stores it if it is the first.
  void Add(int64_t first, const ScoreResult& result);

  /// Returns the number of rows that were compared with the first response for the same row.
  int64_t rows_compared() const;
  /// Returns the number of compared rows that differed in any bit. A response of another version of
  /// the weights counts as one.
  int64_t rows_different() const;
  /// Returns the number of answered rows whose logprob or entropy was requested and is not finite.
  int64_t rows_nonfinite() const;
  /// Returns a description of the first difference, or "" if there is none.
  std::string first_difference() const;

 private:
  struct Entry {
    bool is_answered = false;
    float logprob = 0;    ///< NaN if it was not requested.
    float entropy = 0;    ///< NaN if it was not requested.
    uint64_t digest = 0;  ///< Digest of the bits of every output of the row.
  };

  mutable absl::Mutex mutex_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  int64_t num_compared_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t num_different_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t num_nonfinite_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string first_difference_ ABSL_GUARDED_BY(mutex_);
  std::optional<uint64_t> weights_version_ ABSL_GUARDED_BY(mutex_);
};

/// Results of `bench --verify`: the server's own comparison of its engine with double precision,
/// before and after the loads, and the comparison of the responses with each other.
struct Verification {
  VerifyReport before;
  VerifyReport after;
  /// Number of answered rows whose requested logprob or entropy is NaN or Inf.
  int64_t answers_nonfinite = 0;
  int64_t answers_compared = 0;   ///< Number of rows compared with their first response.
  int64_t answers_different = 0;  ///< Number of these rows that differ in any bit.
  std::string first_difference;   ///< Empty if there is none.

  /// Returns whether every check passed, and at least one row was compared.
  bool passed() const {
    return before.passed && after.passed && answers_nonfinite == 0 && answers_compared > 0 &&
           answers_different == 0;
  }
};

}  // namespace logprobd::client
