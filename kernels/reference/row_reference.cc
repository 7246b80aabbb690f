#include "kernels/reference/row_reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace logprobd::kernels {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double HalfToDouble(uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1F;
  const int mantissa = bits & 0x3FF;
  double magnitude = 0;
  if (exponent == 31) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : kNan;
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, -24);
  } else {
    magnitude = std::ldexp(1024 + mantissa, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

/// Returns ln sum exp(z / t), computed relative to the maximum.
double LogSumExp(std::span<const double> logits, double max_logit, double temperature) {
  double sum = 0;
  for (const double z : logits) sum += std::exp((z - max_logit) / temperature);
  return max_logit / temperature + std::log(sum);
}

/// Returns -sum p ln p as lse' - E[x'] of logits relative to the maximum, so that no large numbers
/// are subtracted from each other. A logit of -inf has p = 0 and adds nothing.
double Entropy(std::span<const double> logits, double max_logit, double temperature) {
  double sum = 0;
  double weighted = 0;
  for (const double z : logits) {
    const double shifted = (z - max_logit) / temperature;
    const double e = std::exp(shifted);
    if (e > 0) {
      sum += e;
      weighted += e * shifted;
    }
  }
  return std::log(sum) - weighted / sum;
}

RowReference NonfiniteRow(const RowQuestion& question) {
  RowReference row;
  row.logprob = row.entropy = row.lse = row.argmax_logprob = row.sum_p_squared = kNan;
  row.max_logit = row.min_logit = kNan;
  row.top_k_ids.assign(static_cast<size_t>(question.top_k), -1);
  row.top_k_logprobs.assign(static_cast<size_t>(question.top_k), kNan);
  row.candidate_logprobs.assign(question.candidate_ids.size(), kNan);
  return row;
}

}  // namespace

RowReference ScoreRowReference(std::span<const double> logits, const RowQuestion& question) {
  const auto [min, max] = std::minmax_element(logits.begin(), logits.end());
  const bool has_nan =
      std::any_of(logits.begin(), logits.end(), [](double z) { return std::isnan(z); });
  if (has_nan || std::isinf(*max)) return NonfiniteRow(question);
  RowReference row;
  row.max_logit = *max;
  row.min_logit = *min;
  row.lse = LogSumExp(logits, *max, question.temperature);
  const auto logprob = [&](int32_t id) {
    return logits[static_cast<size_t>(id)] / question.temperature - row.lse;
  };
  row.logprob = logprob(question.target);
  row.argmax_id =
      static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) -
                           logits.begin());  // max_element returns the first of equal logits
  row.argmax_logprob = logprob(row.argmax_id);
  row.entropy = Entropy(
      logits, *max,
      question.entropy_temperature > 0 ? question.entropy_temperature : question.temperature);
  for (const double z : logits) {
    const double p = std::exp(z / question.temperature - row.lse);
    row.sum_p_squared += p * p;
  }
  const auto target = static_cast<size_t>(question.target);
  row.target_rank = static_cast<int32_t>(
      std::count_if(logits.begin(), logits.end(), [&](double z) { return z > logits[target]; }) +
      std::count(logits.begin(), logits.begin() + question.target, logits[target]));
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto top_k = std::min<size_t>(static_cast<size_t>(question.top_k), ids.size());
  std::partial_sort(ids.begin(), ids.begin() + static_cast<int64_t>(top_k), ids.end(),
                    [&](int32_t a, int32_t b) {
                      const double za = logits[static_cast<size_t>(a)];
                      const double zb = logits[static_cast<size_t>(b)];
                      return za != zb ? za > zb : a < b;
                    });
  for (size_t i = 0; i < top_k; ++i) {
    row.top_k_ids.push_back(ids[i]);
    row.top_k_logprobs.push_back(logprob(ids[i]));
  }
  for (const int32_t id : question.candidate_ids) row.candidate_logprobs.push_back(logprob(id));
  return row;
}

double ElementReference(const void* array, int64_t index, Dtype dtype) {
  const auto* bytes = static_cast<const unsigned char*>(array) + index * DtypeBytes(dtype);
  if (dtype == Dtype::kF32) {
    float value = 0;
    std::memcpy(&value, bytes, sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof(bits));
  return dtype == Dtype::kBf16 ? std::bit_cast<float>(static_cast<uint32_t>(bits) << 16)
                               : HalfToDouble(bits);
}

std::vector<double> LogitsReference(const void* hidden_row, Dtype hidden_dtype, const void* weight,
                                    Dtype weight_dtype, int64_t vocab, int64_t hidden_size,
                                    const LogitTransform& transform, std::span<const float> bias) {
  std::vector<double> hidden(static_cast<size_t>(hidden_size));
  for (int64_t i = 0; i < hidden_size; ++i) {
    hidden[static_cast<size_t>(i)] = ElementReference(hidden_row, i, hidden_dtype);
  }
  std::vector<double> logits(static_cast<size_t>(vocab));
  for (int64_t column = 0; column < vocab; ++column) {
    double dot = 0;
    for (int64_t i = 0; i < hidden_size; ++i) {
      dot += hidden[static_cast<size_t>(i)] *
             ElementReference(weight, column * hidden_size + i, weight_dtype);
    }
    double z = static_cast<double>(transform.scale) * dot;
    if (!bias.empty()) z += static_cast<double>(bias[static_cast<size_t>(column)]);
    if (transform.softcap > 0) {
      z = static_cast<double>(transform.softcap) * std::tanh(z / transform.softcap);
    }
    logits[static_cast<size_t>(column)] = z;
  }
  return logits;
}

}  // namespace logprobd::kernels
