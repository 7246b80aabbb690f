#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/cuda_memory.h"

namespace logprobd::testing {

/// A random bf16 head and hidden rows on the GPU, with logits of standard deviation 3, and what the
/// fused kernel needs beside them, within the workspace that the engine gives it.
class FusedScene {
 public:
  struct Sizes {
    int64_t hidden_size = 0;
    int64_t vocab_size = 0;
    int64_t rows_max = 0;
    /// Heads that calls take in turn, so that a small call does not find its weight in a cache.
    int64_t num_heads = 1;
  };
  /// What is asked beside logprob and entropy, and of what the rows are made.
  struct Ask {
    bool argmax = false;
    bool sum_p_squared = false;
    bool entropy_temperature = false;
    bool terms = false;  ///< Rows as two bf16 terms, which are there already.
    bool combine = true;
  };

  static absl::StatusOr<std::unique_ptr<FusedScene>> Create(const Sizes& sizes);

  /// Enqueues the scoring of `num_rows` rows, in as many launches as the workspace asks for.
  absl::Status Score(int64_t num_rows, const Ask& ask, cudaStream_t stream);

  /// Rows of one launch, as the engine plans it.
  int64_t RowsOfLaunch(const Ask& ask) const;
  const std::byte* hidden() const { return hidden_.get(); }
  /// The head whose turn it is.
  const std::byte* NextWeight();
  int64_t weight_bytes() const;

 private:
  explicit FusedScene(const Sizes& sizes) : sizes_(sizes) {}
  absl::Status Allocate();
  absl::Status ScoreBlock(int64_t row, int64_t num_rows, const Ask& ask, const std::byte* weight,
                          cudaStream_t stream);

  const Sizes sizes_;
  int64_t turn_ = 0;
  DeviceBuffer hidden_;   ///< [rows_max + 256, 2 * hidden_size]: also holds rows of two terms.
  DeviceBuffer weights_;  ///< [num_heads, tiles * 192, hidden_size]
  DeviceBuffer arena_;
  DeviceBuffer floats_;  ///< Scales, logits and scores, rows_max each.
  DeviceBuffer normalizers_;
  DeviceBuffer max_keys_;
  DeviceBuffer targets_;
  DeviceBuffer nonfinite_;
};

}  // namespace logprobd::testing
