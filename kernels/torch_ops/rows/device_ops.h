#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/torch_ops/api/linear_logprob.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {

class ScoringPath;

/// Operations on rows that have their own kernels on some devices. This class has the versions for
/// every device, made of tensor operations; subclasses replace them with kernels. Thread-safe.
class DeviceOps {
 public:
  /// The operations for a type of device. Without CUDA they are this class for all devices.
  static const DeviceOps& For(at::DeviceType type);

  virtual ~DeviceOps() = default;

  /// Whether this build has the fused kernels.
  virtual bool HasFusedKernels() const { return false; }

  /// The path of the fused kernels, or null when they do not support the device, dtypes or hidden
  /// size.
  virtual const ScoringPath* FusedPath(at::Device device, at::ScalarType hidden,
                                       at::ScalarType weight, int64_t hidden_size) const;

  /// Bytes of device memory that this process can still get, including memory that PyTorch holds
  /// unused. When there are at least `enough`, it may return early with any number above that.
  /// 0: unknown.
  virtual int64_t FreeBytes(int64_t device, int64_t enough) const;

  /// Whether a CUDA graph captures the current stream of the device, so that nothing may wait.
  virtual bool IsCapturing(at::Device device) const;

  /// See CompactRows in valid_rows.h.
  virtual RowSubset CompactRows(const at::Tensor& target, int64_t ignore_index,
                                const UpstreamGradients& upstream, IdRange ids, Wait wait) const;

  /// The sum over rows of scores times coefficients, [n] each, as []. Scores with a coefficient of
  /// 0 do not count.
  virtual at::Tensor SumLoss(const LinearLogprobOutputs& scores,
                             const UpstreamGradients& coefficients) const;

  /// Writes `rows` [n, H] times their factors, fp32 [n, 1], to `products` [n, H] of the same dtype,
  /// which may be `rows`. Each product is rounded once.
  virtual void MultiplyRows(const at::Tensor& rows, const at::Tensor& factors,
                            at::Tensor& products) const;

  /// Multiplies `gradient` in place by `factor`, which has one element. See ScaleGradient.
  virtual void Scale(at::Tensor& gradient, const at::Tensor& factor) const;
};

/// The operations for CUDA devices. Only in builds with CUDA.
const DeviceOps& CudaDeviceOps();

}  // namespace logprobd::torch_ops
