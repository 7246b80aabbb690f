#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/dtype.h"
#include "kernels/fused_sm90/fused_partials.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/workspace_plan.h"

namespace logprobd::testing {

/// A random bf16 head and hidden rows on the GPU, and what the fused kernel needs beside them,
/// within the workspace that the engine gives it.
class FusedFixture {
 public:
  struct Sizes {
    int64_t hidden_size = 0;
    int64_t vocab_size = 0;
    int64_t rows_max = 0;
    /// Heads that calls take in turn, so that a small call does not find its weight in a cache.
    int64_t num_heads = 1;
    /// Of the logits that unit normal rows get; the weight has this over sqrt(hidden_size).
    double logit_stddev = 3;
    double weight_mean = 0;  ///< In standard deviations of the weight.
    uint64_t seed = 1;
  };
  /// What is asked beside logprob and entropy, and of what the rows are made.
  struct Ask {
    bool argmax = false;
    bool sum_p_squared = false;
    bool entropy_temperature = false;
    /// Of the rows. Those in fp32 and fp16 are split into bf16 terms before each launch, which
    /// takes as many rows as the engine's, whatever num_splits is.
    kernels::Dtype dtype = kernels::Dtype::kBf16;
    int32_t num_splits = kernels::kHiddenSplits;  ///< Of rows that are split.
    bool corrected = false;   ///< The tensor cores' truncation is taken back (truncation.h).
    int32_t top_k = 0;        ///< 0 to kListMax.
    bool candidates = false;  ///< kListMax ids a row, spread over the vocabulary.
    bool combine = true;
  };

  static constexpr int32_t kListMax = 20;

  static absl::StatusOr<std::unique_ptr<FusedFixture>> Create(const Sizes& sizes);

  /// Enqueues the scoring of `num_rows` rows, in as many launches as the workspace asks for.
  absl::Status Score(int64_t num_rows, const Ask& ask, cudaStream_t stream);

  /// Rows of one launch, as the engine plans it.
  int64_t RowsOfLaunch(const Ask& ask) const;
  /// Rows of a dtype, [rows_max, hidden_size]: unit normal until others are written there. fp16
  /// rows share their place with those in fp32, and must be written.
  std::byte* Rows(kernels::Dtype dtype) const;
  /// [rows_max], spread over the vocabulary until others are written there.
  int32_t* targets() const { return reinterpret_cast<int32_t*>(targets_.get()); }
  /// [rows_max], of the last call.
  const float* logprob() const { return Floats(kLogprob); }
  const float* entropy() const { return Floats(kEntropy); }
  /// The head whose turn it is.
  const std::byte* NextWeight();
  int64_t weight_bytes() const;

 private:
  /// Arrays in `floats_`, AllRows() each.
  enum FloatArray {
    kLog2Scale,
    kCorrectedScale,
    kTargetLogit,
    kLogprob,
    kEntropy,
    kSumPSquared,
    kArgmaxLogprob
  };
  static constexpr int64_t kFloatArrays = kArgmaxLogprob + 1;
  /// Rows as the fused kernel takes them.
  struct PreparedRows {
    const std::byte* data;
    int64_t stride;  ///< Elements.
    int32_t num_splits;
  };

  explicit FusedFixture(const Sizes& sizes)
      : sizes_(sizes),
        plan_(PlanWorkspace({.vocab_size = sizes.vocab_size,
                             .hidden_size = sizes.hidden_size,
                             .with_fused = true})) {}
  absl::Status Allocate();
  absl::Status Fill();
  int64_t AllRows() const;
  float* Floats(FloatArray array) const {
    return reinterpret_cast<float*>(floats_.get()) + array * AllRows();
  }
  /// Rows [row, row + num_rows), split on `stream` where they have to be.
  absl::StatusOr<PreparedRows> PrepareRows(int64_t row, int64_t num_rows, const Ask& ask,
                                           cudaStream_t stream);
  /// The lists of a block whose partials have been joined.
  absl::Status ScoreLists(int64_t row, const kernels::FusedPartialsParams& params, const Ask& ask,
                          cudaStream_t stream);
  absl::Status ScoreBlock(int64_t row, int64_t num_rows, const Ask& ask, const std::byte* weight,
                          cudaStream_t stream);

  const Sizes sizes_;
  const WorkspacePlan plan_;
  int64_t turn_ = 0;
  DeviceBuffer hidden_;   ///< [AllRows(), hidden_size] in bf16.
  DeviceBuffer source_;   ///< [rows_max, hidden_size] in fp32 or fp16.
  DeviceBuffer terms_;    ///< Of the rows of one launch, with spare rows.
  DeviceBuffer lists_;    ///< Four arrays of [rows_max, kListMax]: ids, logprobs; rows, ids.
  DeviceBuffer weights_;  ///< [num_heads, tiles * 192, hidden_size]
  DeviceBuffer arena_;
  DeviceBuffer floats_;
  DeviceBuffer normalizers_;
  DeviceBuffer max_keys_;
  DeviceBuffer targets_;
  DeviceBuffer nonfinite_;
};

}  // namespace logprobd::testing
