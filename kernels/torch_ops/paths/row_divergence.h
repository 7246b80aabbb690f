#pragma once

// Computes divergences, entropies and gradients from a block of dot products of both models.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/torch_ops/types/divergence.h"

namespace logprobd::torch_ops {

/// Columns of a row's statistics, which are fp64: the members of kernels::DivergenceStatistics.
enum DivergenceStatistic : int64_t {
  kStudentLse,
  kTeacherLse,
  kDivergence,
  kStudentShare,
  kEntropy,
  kNumStatistics,
};

/// Head of one model, restricted to the valid columns.
struct DivergenceHead {
  at::Tensor weight;  ///< [columns, H]
  at::Tensor bias;    ///< [columns] in the wide dtype; undefined: none.
  double scale = 1;
  double softcap = 0;  ///< 0: no cap.
};

/// A block of rows. The dot products are in the wide dtype, with GradientPitch elements from one
/// row to the next.
struct DivergenceBlock {
  DivergenceKind kind;
  double beta;
  DivergenceHead student;
  DivergenceHead teacher;
  at::Tensor student_dots;  ///< [n, columns]
  at::Tensor teacher_dots;  ///< [n, columns]
  at::Tensor temperature;   ///< fp64 [n, 1]
};

/// Gradients of a loss with respect to the results of each row, fp64 [n, 1]; undefined: zero. A row
/// with a coefficient of 0 has no part of that gradient, even if it is NaN.
struct DivergenceCoefficients {
  at::Tensor divergence;
  at::Tensor entropy;

  DivergenceCoefficients Slice(int64_t begin, int64_t size) const;
};

/// Computations on a block for which CUDA devices have kernels. This class implements them with
/// tensor operations in fp64, for every device and dtype. Thread-safe.
class RowDivergence {
 public:
  /// Returns the implementation for a device and the dtype of the dot products.
  static const RowDivergence& For(at::DeviceType device, at::ScalarType wide);

  virtual ~RowDivergence() = default;

  /// Writes the statistics of the rows to `statistics`, fp64 [n, kNumStatistics], contiguous.
  virtual void Sum(const DivergenceBlock& block, const at::Tensor& statistics) const;

  /// Writes the gradient of the loss with respect to the student's dot products to `gradient`
  /// [n, columns], whose rows are GradientPitch elements apart. Each element is rounded once.
  virtual void FormGradient(const DivergenceBlock& block, const at::Tensor& statistics,
                            const DivergenceCoefficients& coefficients,
                            const at::Tensor& gradient) const;
};

/// Returns the implementation for CUDA devices. Defined only in builds with CUDA.
const RowDivergence& CudaRowDivergence();

}  // namespace logprobd::torch_ops
