#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>

#include "kernels/torch_ops/rows/valid_rows.h"
#include "kernels/torch_ops/types/linear_logprob.h"

namespace logprobd::torch_ops {

/// Operations on rows for which some devices have their own kernels. This class implements them
/// with tensor operations for every device; subclasses replace them with kernels. Thread-safe.
class DeviceOps {
 public:
  /// Returns the operations for a type of device. Builds without CUDA use this class for all
  /// devices.
  static const DeviceOps& For(at::DeviceType type);

  virtual ~DeviceOps() = default;

  /// Returns the size in bytes of the largest tensor that can still be allocated on the device, or
  /// 0 if it is unknown. Fragments of memory that PyTorch holds unused do not count. If it is at
  /// least `enough`, any number that is not below `enough` may be returned.
  virtual int64_t FreeBytes(int64_t device, int64_t enough) const;

  /// Returns whether a CUDA graph captures the current stream of the device, so that the host must
  /// not wait for it.
  virtual bool IsCapturing(at::Device device) const;

  /// See CompactRows in valid_rows.h.
  virtual RowSubset CompactRows(const at::Tensor& target, int64_t ignore_index,
                                const UpstreamGradients& upstream, IdRange ids, Wait wait) const;

  /// Returns the sum over rows of scores times coefficients, [n] each, as a tensor []. Scores with
  /// a coefficient of 0 are ignored.
  virtual at::Tensor SumLoss(const LinearLogprobOutputs& scores,
                             const UpstreamGradients& coefficients) const;

  /// Writes `rows` [n, H] times their factors, fp32 [n, 1], to `products` [n, H] of the same dtype,
  /// which may be `rows`. Each product is rounded once.
  virtual void MultiplyRows(const at::Tensor& rows, const at::Tensor& factors,
                            at::Tensor& products) const;

  /// Multiplies `gradient` in place by `factor`, which has one element. See ScaleGradient.
  virtual void Scale(at::Tensor& gradient, const at::Tensor& factor) const;
};

/// Calls DeviceOps::IsCapturing for a device, or for that of a tensor.
bool IsCapturing(at::Device device);
bool IsCapturing(const at::Tensor& on_device);

/// Returns an event that happens when the work that the current stream of the device has now is
/// done. The device is not a CPU.
c10::Event RecordEvent(at::Device device);

/// Returns the operations for CUDA devices. Defined only in builds with CUDA.
const DeviceOps& CudaDeviceOps();

}  // namespace logprobd::torch_ops
