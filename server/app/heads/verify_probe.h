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

/// Largest differences, in nats, that pass Verify on CPU and CUDA engines alike. The probe's logits
/// have a standard deviation of about 3, so they reach about 15. An engine sums products in fp32,
/// which changes a log-probability by about 2e-5 at a hidden size of 4,096 (on Hopper's tensor
/// cores, with their truncation corrected; GPUs without the correction come close to the
/// tolerance). A wrong row, scale, bias or cap changes it by 1e-2 or more. Entropy weights each
/// error by (1 + |logprob|), so its tolerance is twice as large.
inline constexpr double kVerifyLogprobTolerance = 1e-4;
inline constexpr double kVerifyEntropyTolerance = 2e-4;

/// Synthetic rows to score; a head and a seed give the same rows on every machine.
struct VerifyProbe {
  Dtype dtype = Dtype::kBf16;     ///< Dtype of the head.
  int64_t rows = 0;               ///< 1 to 64.
  std::vector<std::byte> hidden;  ///< [rows, hidden_size]
  std::vector<int32_t> targets;   ///< [rows], spread evenly from the first id to the last.
};

/// The probe's scores in double precision, computed from the exact stored values.
struct VerifyTruth {
  std::vector<double> logprob;  ///< [rows]
  std::vector<double> entropy;  ///< [rows]
  double logit_stddev = 0;
};

/// Makes normally distributed hidden rows, scaled by a sample of the weight's rows so that logits
/// have a standard deviation of about 3. With logits near 0 the scores would hardly depend on the
/// weight, and with much larger logits one token would have all the probability. Returns an error
/// if the weight cannot be read.
absl::StatusOr<VerifyProbe> MakeVerifyProbe(const HeadWeights& weights,
                                            const VerifyOptions& options);

/// Scores the probe in double precision. Reads the whole weight, one tile of rows at a time, once
/// for every 16 rows of the probe. It runs on the calling thread and takes tens of seconds for a
/// large head. Returns CANCELLED once `stop` is set, and FAILED_PRECONDITION if the weight, or its
/// bias, has a NaN or Inf, because no engine could then agree with the truth.
absl::StatusOr<VerifyTruth> ScoreVerifyProbe(const HeadWeights& weights, const VerifyProbe& probe,
                                             const std::atomic<bool>& stop);

/// Compares an engine's scores with the truth. A NaN counts as an infinite difference.
VerifyReport CompareWithTruth(const VerifyTruth& truth, absl::Span<const float> logprob,
                              absl::Span<const float> entropy);

}  // namespace logprobd
