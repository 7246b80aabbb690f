#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/head_info.h"
#include "server/base/served_head.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// Largest differences that Verify passes, in nats, for CPU and CUDA engines alike. The probe's
/// logits have a standard deviation of about 3, so they reach about 15. An engine sums products in
/// fp32: a log-probability is off by some 2e-5 at a hidden size of 4,096 (Hopper's tensor cores,
/// their truncation taken back; GPUs where it is not come near the tolerance). A wrong row, scale,
/// bias or cap is off by 1e-2 and more. Entropy weights each error with (1 + |logprob|), hence
/// twice as much.
inline constexpr double kVerifyLogprobTolerance = 1e-4;
inline constexpr double kVerifyEntropyTolerance = 2e-4;

/// Rows to score that are the same for a head and a seed on every machine.
struct VerifyProbe {
  Dtype dtype = Dtype::kBf16;     ///< The head's own.
  int64_t rows = 0;               ///< 1 to 64.
  std::vector<std::byte> hidden;  ///< [rows, hidden_size]
  std::vector<int32_t> targets;   ///< [rows], spread over the vocabulary, both ends included.
};

/// The probe's scores in double precision on the exact stored values.
struct VerifyTruth {
  std::vector<double> logprob;  ///< [rows]
  std::vector<double> entropy;  ///< [rows]
  double logit_stddev = 0;
};

/// Normal hidden rows, scaled so that logits have a standard deviation of about 3 (from a sample of
/// the weight's rows; near 0 nothing would be shown, and much larger one token takes all). Errors
/// are those of reading the weight.
absl::StatusOr<VerifyProbe> MakeVerifyProbe(const HeadWeights& weights,
                                            const VerifyOptions& options);

/// Reads the whole weight, a tile of rows at a time, once for every 16 rows of the probe; one
/// thread, tens of seconds for a large head. CANCELLED once `stop` is set.
absl::StatusOr<VerifyTruth> ScoreVerifyProbe(const HeadWeights& weights, const VerifyProbe& probe,
                                             const std::atomic<bool>& stop);

/// Compares an engine's scores with the truth. A NaN is an infinite difference.
VerifyReport CompareWithTruth(const VerifyTruth& truth, absl::Span<const float> logprob,
                              absl::Span<const float> entropy);

}  // namespace logprobd
