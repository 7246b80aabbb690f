#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/fused_fixture.h"
#include "tests/bench/gpu_bench.h"

namespace logprobd::testing {

/// Measures the fused kernel and the GEMM at any number of rows in CUDA graphs. A graph has one
/// call for each of several heads, so that no call finds its weight in a cache.
class RowsBench {
 public:
  static absl::StatusOr<std::unique_ptr<RowsBench>> Create(int64_t hidden_size, int64_t vocab_size,
                                                           int64_t rows_max);

  /// Measures the milliseconds of a call in each round: the GEMM ("gemm") and the fused kernel with
  /// each of `asks`.
  absl::StatusOr<std::map<std::string, std::vector<double>>> Measure(
      int64_t rows, const std::map<std::string, FusedFixture::Ask>& asks, int rounds, Timer& timer);

 private:
  RowsBench() = default;

  std::unique_ptr<FusedFixture> fixture_;
  int64_t hidden_size_ = 0;
  int64_t vocab_size_ = 0;
};

}  // namespace logprobd::testing
