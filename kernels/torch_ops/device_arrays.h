#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/row_ops/copy_and_scale.h"
#include "kernels/row_ops/row_source.h"
#include "kernels/torch_ops/linear_logprob.h"

namespace logprobd::torch_ops {

/// Throws c10::Error, naming `what`, unless `error` is cudaSuccess.
void CheckLaunch(int error, const char* what);

/// fp32 values that lie together, or null for an undefined tensor.
const float* Floats(const at::Tensor& values);

/// Whether LaunchCopyRows takes `rows`, [n, H].
bool AreInWholeVectors(const at::Tensor& rows);

/// What copies the first of `source` [.., H] to `rows` [n, H], which lie together.
kernels::CopyRowsParams CopyOf(const at::Tensor& source, const at::Tensor& rows);

/// Upstream gradients as kernels take them: [all rows] of any stride. Holds their memory.
class UpstreamArrays {
 public:
  explicit UpstreamArrays(const UpstreamGradients& upstream);

  /// Whether kernels may read them there: all of them fp32, on `device`.
  bool AreFp32On(const at::Device& device) const;
  kernels::RowValues logprob() const { return Of(logprob_); }
  kernels::RowValues entropy() const { return Of(entropy_); }
  kernels::RowValues lse() const { return Of(lse_); }
  kernels::RowValues mean_logit() const { return Of(mean_logit_); }

 private:
  static kernels::RowValues Of(const at::Tensor& values);

  at::Tensor logprob_;  // [all rows] or undefined, as these:
  at::Tensor entropy_;
  at::Tensor lse_;
  at::Tensor mean_logit_;
};

}  // namespace logprobd::torch_ops
