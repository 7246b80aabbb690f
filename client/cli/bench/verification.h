#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "client/cli/bench/baseline.h"
#include "client/cli/bench/row_pool.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// Largest differences that pass, in nats. Those of the server's own Verify: an engine sums
/// products in fp32, which puts a log-probability off by some 2e-5 at a hidden size of 4,096 and
/// logits of a standard deviation of about 3; a wrong row, scale, bias or cap is off by 1e-2 and
/// more. Entropy weights each error with (1 + |logprob|), hence twice as much.
inline constexpr double kLogprobTolerance = 1e-4;
inline constexpr double kEntropyTolerance = 2 * kLogprobTolerance;

/// The answers of a run against double precision and against each other.
struct Verification {
  int64_t rows = 0;  ///< Compared with double precision.
  double logprob_difference_max = 0;
  double entropy_difference_max = 0;
  double logprob_tolerance = kLogprobTolerance;
  double entropy_tolerance = kEntropyTolerance;
  int64_t answers_compared = 0;   ///< With the first answer to the same row.
  int64_t answers_different = 0;  ///< In any bit.
  std::string first_difference;   ///< Empty when there is none.

  bool passed() const;
};

/// Scores up to `sample_rows` of the rows that were answered from the weight in `model_folder`, and
/// compares. Errors: those of OpenModelHead; FAILED_PRECONDITION when nothing was answered.
absl::StatusOr<Verification> VerifyAnswers(const Baseline& answers, const RowPool& pool,
                                           const Head& head, const std::string& model_folder,
                                           int64_t sample_rows,
                                           const std::function<void(double)>& on_progress);

}  // namespace logprobd::client
