#include "server/app/heads/verify_probe.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <random>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/common/dtype.h"
#include "kernels/common/tile.h"
#include "kernels/reference/row_reference.h"
#include "server/base/errors.h"
#include "server/engine/kernel_params.h"
#include "server/weights/content_check.h"

namespace logprobd {
namespace {

constexpr double kProbeLogitStddev = 3;
constexpr int64_t kSampledRows = 256;
/// Number of probe rows that one pass over the weight scores. It bounds the memory for their
/// logits.
constexpr int64_t kRowsPerPass = 16;

uint16_t ToBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/// `value` must be finite; a magnitude beyond the range of fp16 becomes the largest fp16 value.
uint16_t ToF16(float value) {
  constexpr float kLargest = 65'504;
  constexpr float kSmallestNormal = 6.103515625e-05F;  // 2^-14
  const float magnitude = std::min(std::abs(value), kLargest);
  int bits = 0;
  if (magnitude < kSmallestNormal) {
    bits = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 24)));
  } else {
    const int exponent = std::ilogb(magnitude);
    const int mantissa = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
    bits = ((exponent + 15) << 10) + (mantissa - 1024);  // a carry increments the exponent
  }
  return static_cast<uint16_t>(bits | (value < 0 ? 0x8000 : 0));
}

void Store(float value, Dtype dtype, std::byte* out) {
  if (dtype == Dtype::kF32) {
    std::memcpy(out, &value, sizeof(value));
    return;
  }
  const uint16_t bits = dtype == Dtype::kBf16 ? ToBf16(value) : ToF16(value);
  std::memcpy(out, &bits, sizeof(bits));
}

/// Generates normally distributed values with the Box-Muller transform. Unlike
/// std::normal_distribution it gives the same values with every standard library.
class NormalSource {
 public:
  explicit NormalSource(uint64_t seed) : engine_(seed) {}

  double Next() {
    const double radius = std::sqrt(-2 * std::log(1 - Uniform()));
    return radius * std::cos(2 * std::numbers::pi * Uniform());
  }

 private:
  double Uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }  // [0, 1)
  std::mt19937_64 engine_;
};

/// Reads rows of a weight as doubles.
class WeightRows {
 public:
  explicit WeightRows(const HeadWeights& weights)
      : weights_(weights),
        hidden_(weights.info().hidden_size),
        row_bytes_(hidden_ * DtypeBytes(weights.info().dtype)) {}

  absl::Status Read(int64_t row_begin, int64_t row_end) {
    stored_.resize(static_cast<size_t>((row_end - row_begin) * row_bytes_));
    LOGPROBD_RETURN_IF_ERROR(weights_.ReadRows(row_begin, row_end, stored_.data(), row_bytes_));
    values_.resize(static_cast<size_t>((row_end - row_begin) * hidden_));
    const kernels::Dtype dtype = KernelDtype(weights_.info().dtype);
    for (size_t i = 0; i < values_.size(); ++i) {
      values_[i] = kernels::ElementReference(stored_.data(), static_cast<int64_t>(i), dtype);
    }
    return absl::OkStatus();
  }

  /// Returns row `row` of the rows that the last Read has read.
  std::span<const double> Row(int64_t row) const {
    return {values_.data() + row * hidden_, static_cast<size_t>(hidden_)};
  }

 private:
  const HeadWeights& weights_;
  const int64_t hidden_;
  const int64_t row_bytes_;
  std::vector<std::byte> stored_;
  std::vector<double> values_;  ///< [rows, hidden]
};

/// Returns the dot product, computed as eight interleaved sums that do not depend on each other.
double Dot(std::span<const double> a, std::span<const double> b) {
  constexpr size_t kLanes = 8;
  double lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= a.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  double sum = 0;
  for (; i < a.size(); ++i) sum += a[i] * b[i];
  for (const double lane : lanes) sum += lane;
  return sum;
}

/// Applies scale, bias and cap as kernels/common/logit_transform.h does.
double Transform(double dot, int64_t column, const HeadInfo& head, const std::vector<float>& bias) {
  double z = static_cast<double>(head.scale) * dot;
  if (!bias.empty()) z += static_cast<double>(bias[static_cast<size_t>(column)]);
  const double cap = head.softcap;
  return cap > 0 ? cap * std::tanh(z / cap) : z;
}

/// Returns the root mean square of the norms of rows spread evenly over the vocabulary.
absl::StatusOr<double> TypicalNorm(const HeadWeights& weights, const std::atomic<bool>* stop) {
  const int64_t vocab = weights.info().vocab_size;
  const int64_t samples = std::min(kSampledRows, vocab);
  WeightRows rows(weights);
  double sum = 0;
  int64_t finite = 0;
  for (int64_t i = 0; i < samples; ++i) {
    if (stop != nullptr && stop->load(std::memory_order_relaxed)) {
      return absl::CancelledError("the Verify was stopped");
    }
    const int64_t row = i * vocab / samples;
    LOGPROBD_RETURN_IF_ERROR(rows.Read(row, row + 1));
    const double square = Dot(rows.Row(0), rows.Row(0));
    if (std::isfinite(square)) {
      sum += square;
      ++finite;
    }
  }
  return finite == 0 ? 0.0 : std::sqrt(sum / static_cast<double>(finite));
}

/// Computes the standard deviation of a stream of logits.
class Spread {
 public:
  void Add(double value) {
    if (std::isfinite(value)) {
      ++count_;
      const double step = value - mean_;
      mean_ += step / static_cast<double>(count_);
      squares_ += step * (value - mean_);
    }
  }
  double stddev() const {
    return count_ == 0 ? 0 : std::sqrt(squares_ / static_cast<double>(count_));
  }

 private:
  int64_t count_ = 0;
  double mean_ = 0;
  double squares_ = 0;
};

/// Returns the logits of rows [row_begin, row_end) of the probe, each [vocab].
absl::StatusOr<std::vector<std::vector<double>>> ProbeLogits(const HeadWeights& weights,
                                                             const VerifyProbe& probe,
                                                             int64_t row_begin, int64_t row_end,
                                                             const std::atomic<bool>& stop) {
  const HeadInfo& head = weights.info();
  const auto rows = static_cast<size_t>(row_end - row_begin);
  std::vector<std::vector<double>> hidden(rows);
  std::vector<std::vector<double>> logits(rows);
  for (size_t row = 0; row < rows; ++row) {
    logits[row].reserve(static_cast<size_t>(head.vocab_size));
    for (int64_t i = 0; i < head.hidden_size; ++i) {
      const int64_t index = (row_begin + static_cast<int64_t>(row)) * head.hidden_size + i;
      hidden[row].push_back(
          kernels::ElementReference(probe.hidden.data(), index, KernelDtype(probe.dtype)));
    }
  }
  const FiniteWeights finite(
      weights, absl::StrCat(head.name, ", tensor ", head.tensor),
      "the scores of such weights cannot be compared, and the engine is not at fault: load weights "
      "that are finite");
  WeightRows tile(finite);
  for (int64_t begin = 0; begin < head.vocab_size; begin += kernels::kTileColumns) {
    if (stop.load(std::memory_order_relaxed)) return absl::CancelledError("the Verify was stopped");
    const int64_t end = std::min<int64_t>(begin + kernels::kTileColumns, head.vocab_size);
    const absl::Status read = tile.Read(begin, end);
    if (absl::IsInvalidArgument(read)) {  // the weight is at fault, not the call
      return absl::FailedPreconditionError(read.message());
    }
    LOGPROBD_RETURN_IF_ERROR(read);
    for (int64_t column = begin; column < end; ++column) {
      for (size_t row = 0; row < rows; ++row) {
        logits[row].push_back(
            Transform(Dot(hidden[row], tile.Row(column - begin)), column, head, weights.bias()));
      }
    }
  }
  return logits;
}

double Difference(double truth, float score) {
  const double difference = std::abs(truth - static_cast<double>(score));
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
}

}  // namespace

absl::StatusOr<VerifyProbe> MakeVerifyProbe(const HeadWeights& weights,
                                            const VerifyOptions& options) {
  const HeadInfo& head = weights.info();
  LOGPROBD_ASSIGN_OR_RETURN(const double norm, TypicalNorm(weights, options.stop.get()));
  const double reach = std::abs(static_cast<double>(head.scale)) * norm;
  const double scale = reach > 0 ? kProbeLogitStddev / reach : 1;

  VerifyProbe probe;
  probe.dtype = head.dtype;
  probe.rows = options.rows;
  const int64_t element_bytes = DtypeBytes(head.dtype);
  const int64_t elements = probe.rows * head.hidden_size;
  probe.hidden.resize(static_cast<size_t>(elements * element_bytes));
  NormalSource normal(options.seed);
  for (int64_t i = 0; i < elements; ++i) {
    Store(static_cast<float>(scale * normal.Next()), probe.dtype,
          probe.hidden.data() + i * element_bytes);
  }
  const int64_t steps = std::max<int64_t>(probe.rows - 1, 1);
  for (int64_t row = 0; row < probe.rows; ++row) {
    probe.targets.push_back(static_cast<int32_t>(row * (head.vocab_size - 1) / steps));
  }
  return probe;
}

absl::StatusOr<VerifyTruth> ScoreVerifyProbe(const HeadWeights& weights, const VerifyProbe& probe,
                                             const std::atomic<bool>& stop) {
  VerifyTruth truth;
  Spread spread;
  for (int64_t begin = 0; begin < probe.rows; begin += kRowsPerPass) {
    const int64_t end = std::min(begin + kRowsPerPass, probe.rows);
    LOGPROBD_ASSIGN_OR_RETURN(const std::vector<std::vector<double>> logits,
                              ProbeLogits(weights, probe, begin, end, stop));
    for (int64_t row = begin; row < end; ++row) {
      const std::vector<double>& z = logits[static_cast<size_t>(row - begin)];
      std::for_each(z.begin(), z.end(), [&spread](double logit) { spread.Add(logit); });
      kernels::RowQuestion question;
      question.target = probe.targets[static_cast<size_t>(row)];
      const kernels::RowReference score = kernels::ScoreRowReference(z, question);
      truth.logprob.push_back(score.logprob);
      truth.entropy.push_back(score.entropy);
    }
  }
  truth.logit_stddev = spread.stddev();
  return truth;
}

VerifyReport CompareWithTruth(const VerifyTruth& truth, absl::Span<const float> logprob,
                              absl::Span<const float> entropy) {
  VerifyReport report;
  report.rows = static_cast<int32_t>(truth.logprob.size());
  report.logit_stddev = truth.logit_stddev;
  report.logprob_tolerance = kVerifyLogprobTolerance;
  report.entropy_tolerance = kVerifyEntropyTolerance;
  for (size_t row = 0; row < truth.logprob.size(); ++row) {
    report.logprob_difference_max =
        std::max(report.logprob_difference_max, Difference(truth.logprob[row], logprob[row]));
    report.entropy_difference_max =
        std::max(report.entropy_difference_max, Difference(truth.entropy[row], entropy[row]));
  }
  report.passed = report.logprob_difference_max <= report.logprob_tolerance &&
                  report.entropy_difference_max <= report.entropy_tolerance;
  return report;
}

}  // namespace logprobd
