#pragma once

// The rows that a pass computes, and the blocks in which their dot products exist.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "kernels/torch_ops/paths/row_divergence.h"
#include "kernels/torch_ops/rows/shard.h"
#include "kernels/torch_ops/rows/valid_rows.h"
#include "kernels/torch_ops/types/divergence.h"

namespace logprobd::torch_ops {

/// Returns the mask, bool [all rows]; undefined: none.
at::Tensor FlatMask(const DivergenceInputs& inputs);

/// Returns `values` [all rows], 0 where `mask` is 0. The mask may be undefined.
at::Tensor WithoutMasked(const at::Tensor& values, const at::Tensor& mask);

/// The rows of a pass, as a subset of all rows, and both models' heads.
struct DivergenceRows {
  Rows subset;                ///< Only row_indices and num_all are set.
  at::Tensor student_hidden;  ///< [n, H_s]
  at::Tensor teacher_hidden;  ///< [n, H_t]
  at::Tensor temperature;     ///< fp64 [n, 1]
  DivergenceKind kind;
  double beta;
  DivergenceHead student;
  DivergenceHead teacher;
  at::ScalarType wide;

  int64_t size() const { return student_hidden.size(0); }
  int64_t columns() const { return student.weight.size(0); }
  bool are_gradients_in_sixteen_bits() const;
  DivergenceRowBytes row_bytes() const;
  const RowDivergence& ops() const {
    return RowDivergence::For(student_hidden.device().type(), wide);
  }

  /// Returns rows [begin, begin + size), without their subset.
  DivergenceRows Slice(int64_t begin, int64_t size) const;
  /// Returns a buffer for the gradients of `num_rows` rows, [num_rows, GradientPitch].
  at::Tensor EmptyGradients(int64_t num_rows) const;
};

/// Returns the rows where `is_selected`, bool [all rows], holds, or all rows if it is undefined.
/// Waits for the device in the first case.
DivergenceRows SelectRows(const at::Tensor& is_selected, const DivergenceInputs& inputs,
                          const DivergenceOptions& options);

/// Numbers of rows that exist at a time.
struct BlockRows {
  int64_t logits;     ///< Rows whose logits exist.
  int64_t gradients;  ///< Rows whose gradients exist until they are multiplied; >= logits.
};

/// Divides `num_rows` rows into blocks within `bytes`. The gradients of all rows exist at a time if
/// logits of enough rows fit beside them: the weight's gradient is then written once.
BlockRows BlocksWithin(int64_t bytes, int64_t num_rows, const DivergenceRowBytes& row_bytes);

/// Computes the dot products of the rows, `block_rows` rows at a time, and calls `visit` with each
/// block and its first row.
void ForEachBlock(const DivergenceRows& rows, int64_t block_rows,
                  const std::function<void(const DivergenceBlock&, int64_t)>& visit);

/// Calls `visit` with blocks of columns: with all of them if factors are multiplied in 16 bits,
/// otherwise with few enough that conversions take little memory.
void ForEachColumns(bool is_sixteen_bits, int64_t num_rows, int64_t num_columns,
                    const std::function<void(Columns)>& visit);

}  // namespace logprobd::torch_ops
