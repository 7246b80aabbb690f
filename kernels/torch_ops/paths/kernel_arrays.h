#pragma once

// Converts tensors to operands of the fused kernels. Compiled only in builds with CUDA.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "kernels/common/logit_scale.h"
#include "kernels/row_ops/row_source.h"
#include "kernels/torch_ops/paths/problem.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::kernels {
struct FusedPartialsParams;
}  // namespace logprobd::kernels

namespace logprobd::torch_ops {

/// The fused kernels require row strides and a hidden size that are multiples of this number of
/// elements, which is 16 bytes.
inline constexpr int64_t kRowAlignment = 8;

/// Returns the rows, [n, H], themselves if the fused kernels can read them in place, otherwise a
/// copy.
at::Tensor Aligned(const at::Tensor& rows);

/// Returns the first `columns` elements of `values` as fp32, padded with zeros to whole tiles.
at::Tensor PaddedToTiles(const at::Tensor& values, int64_t columns);

/// Holds a block of hidden states as the fused kernels multiply them: in the weight's dtype or, if
/// hidden has another one, as bf16 splits (kernels/common/dtype.h). Owns the splits, or a copy if
/// the rows are not aligned.
class FusedRows {
 public:
  FusedRows(const at::Tensor& hidden, const Problem& problem);

  /// Returns uninitialised memory for the splits of `num_rows` rows, or an undefined tensor if the
  /// rows are not split.
  static at::Tensor EmptySplits(int64_t num_rows, const Problem& problem);

  /// Returns rows [begin, begin + size).
  FusedRows Slice(int64_t begin, int64_t size) const;

  const at::Tensor& operand() const { return operand_; }
  int32_t num_splits() const { return num_splits_; }
  /// Returns tensors [n, H] in the weight's dtype, the smallest values first, whose sum is hidden
  /// to at least 16 bits.
  std::vector<at::Tensor> Terms() const;

 private:
  int64_t hidden_size_;
  int32_t num_splits_;
  at::Tensor operand_;  // [n, H] or [n, num_splits * SplitPitch(H)]
};

/// Holds a shard of the weight as an operand of the fused kernels. The kernels treat the shard as a
/// whole vocabulary whose column 0 is the shard's first column. Its rows are aligned
/// (FusedPath::AlignInputs).
class FusedHead {
 public:
  explicit FusedHead(const Problem& problem);

  int64_t num_tiles() const;
  /// Returns the truncation correction that scales of temperatures contain.
  double correction() const { return corrected_.correction; }
  /// Returns d(x) / d(dot product), without a cap, divided by the row's log2_scale.
  double gradient_per_log2_scale() const;

  /// Returns the operands of tiles [tile_begin, tile_end). The caller sets outputs and per-row
  /// inputs. The operands are valid while this object and `rows` live.
  kernels::FusedPartialsParams Params(const FusedRows& rows, int64_t tile_begin,
                                      int64_t tile_end) const;

 private:
  double scale_;
  int64_t columns_;
  kernels::CorrectedTransform corrected_;
  at::Tensor weight_;  // [columns, H]
  at::Tensor bias_;    // fp32 [tiles * 192] or undefined
};

/// Holds the per-row inputs in the trainer's memory as operands of kernels. Owns copies of the
/// inputs that had to be converted.
class RowArrays {
 public:
  RowArrays(const Rows& rows, const Problem& problem, const FusedHead& head);

  const kernels::RowSource& source() const { return source_; }

 private:
  at::Tensor targets_;       // int64 [all rows]
  at::Tensor temperatures_;  // fp32 [all rows] or undefined
  at::Tensor row_indices_;   // int64 [n] or undefined
  kernels::RowSource source_;
};

}  // namespace logprobd::torch_ops
