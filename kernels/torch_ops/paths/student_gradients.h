#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/torch_ops/paths/divergence_rows.h"
#include "kernels/torch_ops/rows/shard.h"
#include "kernels/torch_ops/types/divergence.h"

namespace logprobd::torch_ops {

/// Sums of the gradients of the student's tensors over the rows of a pass. The inputs must outlive
/// it.
class StudentGradients {
 public:
  /// `is_at_once`: all rows are added by one call of Add.
  StudentGradients(const DivergenceInputs& inputs, const DivergenceRows& rows, GradientNeeds needs,
                   bool is_at_once);

  /// Adds the gradients of `rows`, which begin at row `begin` of the pass. `gradient` [n, columns]
  /// is the gradient with respect to the dot products, and is still to be multiplied by `factors`
  /// [n, 1] if these are defined.
  void Add(const DivergenceRows& rows, int64_t begin, const at::Tensor& gradient,
           const at::Tensor& factors);

  /// Returns the gradients of all rows in the inputs' dtypes. `subset` are the rows of the pass.
  InputGradients Result(const Rows& subset) const;

 private:
  void AddBias(const DivergenceRows& rows, Columns columns, const at::Tensor& part,
               const at::Tensor& factors) const;

  const DivergenceInputs& inputs_;
  const at::ScalarType wide_;
  at::Tensor hidden_;  // [n, H] in the dtype of student_hidden, or undefined
  at::Tensor weight_;  // [V, H] or undefined
  at::Tensor bias_;    // [V] in the wide dtype, or undefined
};

}  // namespace logprobd::torch_ops
