#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/torch_ops/paths/scoring_path.h"

namespace logprobd::torch_ops {

/// Computes scores and gradients with the fused kernels; the tensor path computes the gradients
/// that the kernels do not support. Defined only in builds with CUDA.
class FusedPath : public ScoringPath {
 public:
  /// See GetFusedPath and SlowPathReason. `device` is a CUDA device.
  static const ScoringPath* For(at::Device device, at::ScalarType hidden, at::ScalarType weight,
                                int64_t hidden_size);
  static std::string SlowReason(at::Device device, at::ScalarType hidden, at::ScalarType weight,
                                int64_t hidden_size);

  /// Largest number of rows for which kernels start during the row compaction. The rows are then
  /// copied even if all of them are valid, which costs more than the wait if there are more rows.
  static constexpr int64_t kCompactionRowsMax = 4'096;
  /// Number of rows in a block of scores. The partials of a block take 16 bytes per row and tile.
  static constexpr int64_t kScoreRowsMax = 8'192;
  static_assert(kCompactionRowsMax <= kScoreRowsMax, "a pending compaction must fit one block");

  bool is_fused() const override { return true; }
  int64_t BlockRows(const Problem& /*problem*/) const override { return kScoreRowsMax; }

  // fused_scores.cc
  bool ScoresDuringCompaction(const Problem& problem) const override;
  void AlignInputs(LinearLogprobInputs& inputs) const override;
  void ReserveMemory(int64_t num_rows, const Problem& problem) const override;
  std::unique_ptr<PendingScores> StartScores(const Rows& block, const Problem& problem,
                                             const at::Tensor& cache) const override;

  // fused_gradients.cc
  bool DifferentiatesDuringCompaction(const UpstreamGradients& upstream,
                                      const Problem& problem) const override;
  std::unique_ptr<DotGradients> MakeDotGradients(
      const DotGradientsArguments& arguments) const override;
};

}  // namespace logprobd::torch_ops
