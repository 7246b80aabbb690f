#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/base/head_info.h"
#include "server/weights/head_weights.h"

namespace logprobd::testing {

/// Rounds `values` to nearest even and stores them as `dtype`, little-endian.
std::vector<std::byte> EncodeFloats(absl::Span<const float> values, Dtype dtype);

/// A head whose weight, [info.vocab_rows, info.hidden_size] of info.dtype, is in memory.
class InMemoryHead : public HeadWeights {
 public:
  /// `weight` must have the size that `info` states; `bias` is empty or [info.vocab_rows].
  InMemoryHead(HeadInfo info, std::vector<std::byte> weight, std::vector<float> bias = {});

  const HeadInfo& info() const override { return info_; }
  absl::Status ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                        int64_t row_pitch_bytes) const override;
  const std::vector<float>& bias() const override { return bias_; }

  const std::byte* weight() const { return weight_.data(); }

  /// Makes ReadRows fail with `status` for rows at or beyond `row`.
  void FailReadsFrom(int64_t row, absl::Status status);

 private:
  HeadInfo info_;
  std::vector<std::byte> weight_;
  std::vector<float> bias_;
  int64_t failing_row_;
  absl::Status failure_;
};

struct RandomHeadOptions {
  int64_t vocab_size = 192;
  int64_t hidden_size = 64;
  /// Number of weight rows beyond vocab_size. They are NaN, so that a test detects any use of them.
  int64_t padding_rows = 0;
  Dtype dtype = Dtype::kBf16;
  /// Standard deviation of the dot products with standard normal hidden rows.
  double logit_stddev = 3;
  bool bias = false;  ///< Adds a standard normal bias.
  float scale = 1;
  float softcap = 0;
  uint64_t seed = 1;
};

std::unique_ptr<InMemoryHead> MakeRandomHead(const RandomHeadOptions& options);

/// Returns `count` standard normal values, the same on every machine for a given seed.
std::vector<float> NormalValues(int64_t count, uint64_t seed);

}  // namespace logprobd::testing
