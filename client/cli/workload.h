#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/score_args.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// `value` as bf16 or f16, rounded to nearest even; f16 beyond its range becomes infinite.
uint16_t ToBf16(float value);
uint16_t ToF16(float value);

/// A request of random rows for a head: hidden states of standard normal elements, targets spread
/// over its vocabulary. The same seed gives the same bytes on every machine.
class Workload {
 public:
  Workload(const Head& head, Dtype dtype, int64_t rows, uint64_t seed);
  Workload(const Workload&) = delete;
  Workload& operator=(const Workload&) = delete;

  /// May be changed but for what refers to the arrays.
  ScoreArgs& args() { return args_; }
  const ScoreArgs& args() const { return args_; }
  int64_t hidden_bytes() const { return static_cast<int64_t>(hidden_.size()); }

 private:
  std::vector<std::byte> hidden_;
  std::vector<int32_t> targets_;
  ScoreArgs args_;
};

/// The values of "4", "1:8", "1:16:5" (start, end, step; the end is included when a step meets it).
/// INVALID_ARGUMENT unless all are 1 or more, start <= end and there are at most 1,000.
absl::StatusOr<std::vector<int64_t>> ParseRange(absl::string_view text);

}  // namespace logprobd::client
