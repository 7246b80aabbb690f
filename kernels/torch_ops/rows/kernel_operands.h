#pragma once

// Converts tensors to operands of the CUDA kernels. Compiled only in builds with CUDA.

#include <ATen/core/Tensor.h>

#include "kernels/row_ops/copy_and_scale.h"
#include "kernels/row_ops/row_source.h"
#include "kernels/torch_ops/types/linear_logprob.h"

namespace logprobd::torch_ops {

/// Returns whether the values begin at an address from which kernels can load vectors.
bool IsAddressAligned(const at::Tensor& values);

/// Throws a c10::Error that names `what`, unless `error` is cudaSuccess.
void CheckLaunch(int error, const char* what);

/// Returns a pointer to contiguous fp32 values, or null for an undefined tensor.
const float* Floats(const at::Tensor& values);

/// Returns whether LaunchCopyRows supports `rows`, [n, H].
bool IsVectorAligned(const at::Tensor& rows);

/// Returns the parameters that copy the first n rows of `source`, [.., H], to the contiguous
/// `rows`, [n, H].
kernels::CopyRowsParams CopyParams(const at::Tensor& source, const at::Tensor& rows);

/// Holds the upstream gradients, [all rows] each, with any stride. Owns their memory.
class UpstreamArrays {
 public:
  explicit UpstreamArrays(const UpstreamGradients& upstream);

  /// Returns whether all of them are fp32 on `device`, so that kernels can read them.
  bool AreFp32On(const at::Device& device) const;
  /// Returns one of kUpstreamScores; without values if it is absent.
  kernels::RowValues Of(MaybeTensor UpstreamGradients::*score) const;

 private:
  UpstreamGradients flat_;  // [all rows] each
};

}  // namespace logprobd::torch_ops
