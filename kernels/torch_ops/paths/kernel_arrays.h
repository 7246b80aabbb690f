#pragma once

// Converts tensors to operands of the CUDA kernels. Compiled only in builds with CUDA.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/row_ops/copy_and_scale.h"
#include "kernels/row_ops/row_source.h"
#include "kernels/torch_ops/api/linear_logprob.h"
#include "kernels/torch_ops/api/problem.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::kernels {
struct FusedPartialsParams;
}  // namespace logprobd::kernels

namespace logprobd::torch_ops {

/// The fused kernels require row strides and a hidden size that are multiples of this number of
/// elements, which is 16 bytes.
inline constexpr int64_t kRowAlignment = 8;

/// Throws a c10::Error that names `what`, unless `error` is cudaSuccess.
void CheckLaunch(int error, const char* what);

/// Returns a pointer to contiguous fp32 values, or null for an undefined tensor.
const float* Floats(const at::Tensor& values);

/// Returns whether LaunchCopyRows supports `rows`, [n, H].
bool IsVectorAligned(const at::Tensor& rows);

/// Returns the parameters that copy the first n rows of `source`, [.., H], to the contiguous
/// `rows`, [n, H].
kernels::CopyRowsParams CopyParams(const at::Tensor& source, const at::Tensor& rows);

/// Returns the first `columns` elements of `values` as fp32, padded with zeros to whole tiles.
at::Tensor PaddedToTiles(const at::Tensor& values, int64_t columns);

/// Holds the upstream gradients, [all rows] each, with any stride. Owns their memory.
class UpstreamArrays {
 public:
  explicit UpstreamArrays(const UpstreamGradients& upstream);

  /// Returns whether all of them are fp32 on `device`, so that kernels can read them.
  bool AreFp32On(const at::Device& device) const;
  kernels::RowValues logprob() const { return Values(logprob_); }
  kernels::RowValues entropy() const { return Values(entropy_); }
  kernels::RowValues lse() const { return Values(lse_); }
  kernels::RowValues mean_logit() const { return Values(mean_logit_); }

 private:
  static kernels::RowValues Values(const at::Tensor& values);

  // Each is [all rows] or undefined.
  at::Tensor logprob_;
  at::Tensor entropy_;
  at::Tensor lse_;
  at::Tensor mean_logit_;
};

/// Holds a block of hidden states and a shard of the weight as operands of the fused kernels. The
/// kernels treat the shard as a whole vocabulary whose column 0 is the shard's first column. Owns
/// copies of the tensors that are not aligned.
class FusedHead {
 public:
  FusedHead(const at::Tensor& hidden, const Problem& problem);

  /// Returns the head with rows [begin, begin + size) of the hidden states.
  FusedHead Slice(int64_t begin, int64_t size) const;

  int64_t num_tiles() const;
  /// Returns log2(e), times the truncation correction unless the logits contain it already.
  double log2_factor() const;
  /// Returns d(x) / d(dot product), without a cap, divided by the row's log2_scale.
  double gradient_per_log2_scale() const;

  /// Returns the operands of tiles [tile_begin, tile_end). The caller sets outputs and per-row
  /// inputs. The operands are valid while this object lives.
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

/// Holds the per-row inputs in the trainer's memory as operands of kernels. Owns copies of the
/// inputs that had to be converted.
class RowArrays {
 public:
  RowArrays(const Rows& rows, const Problem& problem, const FusedHead& head);

  const kernels::RowSource& source() const { return source_; }

 private:
  at::Tensor targets_;       // int64 [all rows]
  at::Tensor temperatures_;  // fp64 [all rows] or undefined
  at::Tensor row_indices_;   // int64 [n] or undefined
  kernels::RowSource source_;
};

}  // namespace logprobd::torch_ops
