#include "client/cli/bench/verification.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/bench/double_reference.h"
#include "client/cli/bench/model_head.h"

namespace logprobd::client {
namespace {

/// A NaN is an infinite difference.
double Difference(double truth, float score) {
  const double difference = std::abs(truth - static_cast<double>(score));
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
}

}  // namespace

bool Verification::passed() const {
  return rows > 0 && answers_different == 0 && logprob_difference_max <= logprob_tolerance &&
         entropy_difference_max <= entropy_tolerance;
}

absl::StatusOr<Verification> VerifyAnswers(const Baseline& answers, const RowPool& pool,
                                           const Head& head, const std::string& model_folder,
                                           int64_t sample_rows,
                                           const std::function<void(double)>& on_progress) {
  const absl::StatusOr<ModelHead> model = OpenModelHead(model_folder, head);
  if (!model.ok()) return model.status();
  const std::vector<Baseline::Answer> sample = answers.Sample(sample_rows);
  if (sample.empty()) {
    return absl::FailedPreconditionError("no request was answered: there is nothing to verify");
  }
  std::vector<ReferenceRow> rows;
  rows.reserve(sample.size());
  for (const Baseline::Answer& answer : sample) {
    rows.push_back({.hidden = pool.hidden().data() + answer.row * pool.row_bytes(),
                    .target = pool.targets()[static_cast<size_t>(answer.row)]});
  }
  const std::vector<ReferenceScore> truth =
      ScoreInDouble(*model, head, pool.dtype(), rows, on_progress);

  Verification result{.rows = static_cast<int64_t>(rows.size()),
                      .answers_compared = answers.rows_compared(),
                      .answers_different = answers.rows_different(),
                      .first_difference = answers.first_difference()};
  for (size_t row = 0; row < truth.size(); ++row) {
    result.logprob_difference_max = std::max(result.logprob_difference_max,
                                             Difference(truth[row].logprob, sample[row].logprob));
    result.entropy_difference_max = std::max(result.entropy_difference_max,
                                             Difference(truth[row].entropy, sample[row].entropy));
  }
  return result;
}

}  // namespace logprobd::client
