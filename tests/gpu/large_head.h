#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/weights/head_weights.h"
#include "tests/support/engine_case.h"

namespace logprobd::testing {

/// A bf16 head of any size whose weight is computed when it is read. Its normal values give logits
/// of the requested standard deviation for standard normal hidden rows.
class LargeHead : public HeadWeights {
 public:
  LargeHead(int64_t vocab_size, int64_t hidden_size, double logit_stddev);

  const HeadInfo& info() const override { return info_; }
  absl::Status ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                        int64_t row_pitch_bytes) const override;
  const std::vector<float>& bias() const override { return bias_; }

 private:
  HeadInfo info_;
  std::vector<float> bias_;
  std::vector<uint16_t> values_;  ///< 65,536 normal values in bf16; a hash picks from them.
};

/// Makes standard normal bf16 rows with random targets, temperature 1 and the outputs logprob and
/// entropy.
EngineCase MakeLargeCase(const LargeHead& head, int64_t num_rows, uint64_t seed);

/// Computes the logits of rows `rows` of `inputs` (bf16) in double precision, [rows, vocab], on all
/// cores.
std::vector<std::vector<double>> LargeLogitsReference(const LargeHead& head,
                                                      const EngineCase& inputs,
                                                      const std::vector<int64_t>& rows);

}  // namespace logprobd::testing
