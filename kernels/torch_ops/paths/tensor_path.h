#pragma once

#include <cstdint>
#include <memory>

#include "kernels/torch_ops/paths/scoring_path.h"

namespace logprobd::torch_ops {

/// Computes scores and gradients with tensor operations, for every device, dtype and option.
class TensorPath : public ScoringPath {
 public:
  // tensor_scores.cc
  int64_t BlockRows(const Problem& problem) const override;
  std::unique_ptr<PendingScores> StartScores(const Rows& block, const Problem& problem,
                                             const at::Tensor& cache) const override;

  // tensor_gradients.cc
  std::unique_ptr<DotGradients> MakeDotGradients(
      const DotGradientsArguments& arguments) const override;
};

}  // namespace logprobd::torch_ops
