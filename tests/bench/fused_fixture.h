#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/dtype.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/params.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/workspace_plan.h"

namespace logprobd::testing {

/// A random bf16 head and hidden rows on the GPU, with the buffers that the fused kernel needs.
class FusedFixture {
 public:
  struct Sizes {
    int64_t hidden_size = 0;
    int64_t vocab_size = 0;
    int64_t rows_max = 0;
    /// Number of heads that calls use in turn, so that a small call does not find its weight in a
    /// cache.
    int64_t num_heads = 1;
    /// Standard deviation of the logits of standard normal rows. The weight has this standard
    /// deviation divided by sqrt(hidden_size).
    double logit_stddev = 3;
    double weight_mean = 0;  ///< Mean of the weight, in standard deviations of the weight.
    uint64_t seed = 1;
    int64_t workspace_bytes = int64_t{64} << 20;  ///< By default as large as in the engine.
  };
  /// The outputs of a call in addition to logprob and entropy, and the type of its rows.
  struct Ask {
    bool argmax = false;
    bool target_rank = false;
    bool sum_p_squared = false;
    bool entropy_temperature = false;
    /// Type of the rows. fp32 and fp16 rows are split into bf16 values before each launch. A launch
    /// has the same number of rows as in the engine, whatever num_splits is.
    kernels::Dtype dtype = kernels::Dtype::kBf16;
    int32_t num_splits = kernels::kHiddenSplits;  ///< Number of splits of fp32 and fp16 rows.
    bool corrected = false;                       ///< Corrects the truncation of the tensor cores.
    int32_t top_k = 0;                            ///< 0 to kListMax.
    /// Scores kListMax candidates per row, with ids that are spread over the vocabulary.
    bool candidates = false;
    bool combine = true;
    std::optional<kernels::FusedChoice> choice = {};  ///< Instead of the fastest choice.
  };

  static constexpr int32_t kListMax = 20;

  static absl::StatusOr<std::unique_ptr<FusedFixture>> Create(const Sizes& sizes);

  /// Enqueues the scoring of `num_rows` rows, in as many launches as the workspace requires.
  absl::Status Score(int64_t num_rows, const Ask& ask, cudaStream_t stream);

  /// Returns the number of rows of one launch, which is the same as in the engine.
  int64_t RowsOfLaunch(const Ask& ask) const;
  /// Returns the rows of a dtype, [rows_max, hidden_size], which are standard normal until a caller
  /// writes others. fp16 rows share memory with fp32 rows, so a caller must write them before use.
  std::byte* Rows(kernels::Dtype dtype) const;
  /// Returns the targets [rows_max], which are spread over the vocabulary until a caller writes
  /// others.
  int32_t* targets() const { return reinterpret_cast<int32_t*>(targets_.get()); }
  /// These return the scores [rows_max] of the last call.
  const float* logprob() const { return Floats(kLogprob); }
  const float* entropy() const { return Floats(kEntropy); }
  /// Returns the head of the next call and moves on to the one after it.
  const std::byte* NextWeight();
  int64_t weight_bytes() const;

 private:
  /// Arrays in `floats_`, each with AllRows() elements.
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
  /// Rows in the form that the fused kernel takes.
  struct PreparedRows {
    const std::byte* data;
    int64_t stride;  ///< Distance between rows, in elements.
    int32_t num_splits;
  };

  explicit FusedFixture(const Sizes& sizes)
      : sizes_(sizes),
        plan_(PlanWorkspace({.vocab_size = sizes.vocab_size,
                             .hidden_size = sizes.hidden_size,
                             .with_fused = true,
                             .fused_workspace_bytes = sizes.workspace_bytes})) {}
  absl::Status Allocate();
  absl::Status Fill();
  int64_t AllRows() const;
  float* Floats(FloatArray array) const {
    return reinterpret_cast<float*>(floats_.get()) + array * AllRows();
  }
  /// Splits rows [row, row + num_rows) on `stream` if necessary, and returns them.
  absl::StatusOr<PreparedRows> PrepareRows(int64_t row, int64_t num_rows, const Ask& ask,
                                           cudaStream_t stream);
  /// Scores the lists of a block whose partials have been combined.
  absl::Status ScoreLists(int64_t row, const kernels::FusedPartialsParams& params, const Ask& ask,
                          cudaStream_t stream);
  absl::Status ScoreBlock(int64_t row, int64_t num_rows, const Ask& ask, const std::byte* weight,
                          cudaStream_t stream);

  const Sizes sizes_;
  const WorkspacePlan plan_;
  int64_t turn_ = 0;
  DeviceBuffer hidden_;  ///< [AllRows(), hidden_size] in bf16.
  DeviceBuffer source_;  ///< [rows_max, hidden_size] in fp32 or fp16.
  DeviceBuffer splits_;  ///< Splits of the rows of one launch, with spare rows.
  /// Four arrays of [rows_max, kListMax]: ids and logprobs of results, rows and ids of candidates.
  DeviceBuffer lists_;
  DeviceBuffer weights_;  ///< [num_heads, tiles * 192, hidden_size]
  DeviceBuffer arena_;
  DeviceBuffer floats_;
  DeviceBuffer normalizers_;
  DeviceBuffer max_keys_;
  DeviceBuffer ranks_;  ///< [2, AllRows()]: counts, then the ranks of the last call.
  DeviceBuffer targets_;
  DeviceBuffer nonfinite_;
};

}  // namespace logprobd::testing
