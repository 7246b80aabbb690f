#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/row_ops/row_source.h"
#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/rows.h"
#include "kernels/torch_ops/shard.h"

namespace logprobd::kernels {
struct FusedPartialsParams;
}  // namespace logprobd::kernels

namespace logprobd::torch_ops {

/// Whether the fused kernels take these inputs: both 16-bit, of one dtype, hidden size a multiple
/// of 8, on a GPU of compute capability 9.0, in a build that has the kernels. Memory is not looked
/// at: what is not laid out as they want it is copied.
bool IsFused(const LinearLogprobInputs& inputs);

/// A block of hidden states and a shard as the fused kernels take them. The shard counts as a whole
/// vocabulary: column 0 is its first.
class FusedHead {
 public:
  FusedHead(const at::Tensor& hidden, const LinearLogprobInputs& inputs,
            const LinearLogprobOptions& options, const Shard& shard);

  int64_t num_tiles() const;
  /// log2(e), and what the logits lack.
  double log2_factor() const;
  /// d(x)/d(dot) without a cap over log2_scales.
  double gradient_per_log2_scale() const;

  /// Operands of some tiles; what is one a row and outputs are the caller's to set. Holds while
  /// this lives.
  kernels::FusedPartialsParams Params(int64_t tile_begin, int64_t tile_end) const;

 private:
  double scale_;
  double softcap_;
  double correction_;
  int64_t columns_;
  bool transforms_;
  at::Tensor hidden_;  // [n, H]
  at::Tensor weight_;  // [columns, H]
  at::Tensor bias_;    // fp32 [tiles * 192] or undefined
};

/// What is one a row, in the trainer's memory, as kernels take it. Holds what it had to convert.
class RowArrays {
 public:
  RowArrays(const Rows& rows, const LinearLogprobInputs& inputs,
            const LinearLogprobOptions& options, const Shard& shard, const FusedHead& head);

  const kernels::RowSource& source() const { return source_; }

 private:
  at::Tensor targets_;       // int64 [all rows]
  at::Tensor temperatures_;  // fp64 [all rows] or undefined
  at::Tensor places_;        // int64 [n] or undefined
  kernels::RowSource source_;
};

/// fp32 values of the shard's columns, 0 up to whole tiles.
at::Tensor PaddedToTiles(const at::Tensor& values, int64_t columns);

}  // namespace logprobd::torch_ops
