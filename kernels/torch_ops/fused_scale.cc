#include "kernels/torch_ops/fused_scale.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstdint>
#include <optional>

#include "kernels/row_ops/copy_and_scale.h"
#include "kernels/torch_ops/device_arrays.h"

namespace logprobd::torch_ops {
namespace {

std::optional<kernels::Dtype> DtypeOf(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kernels::Dtype::kF32;
    case at::kBFloat16:
      return kernels::Dtype::kBf16;
    case at::kHalf:
      return kernels::Dtype::kF16;
    default:
      return std::nullopt;
  }
}

}  // namespace

bool ScaleOnGpu(const at::Tensor& gradient, const at::Tensor& factor) {
  constexpr uintptr_t kAlignment = 16;
  const auto dtype = DtypeOf(gradient);
  if (!gradient.is_cuda() || !dtype.has_value() || !gradient.is_contiguous() ||
      factor.device() != gradient.device() || factor.scalar_type() != at::kFloat ||
      reinterpret_cast<uintptr_t>(gradient.const_data_ptr()) % kAlignment != 0) {
    return false;
  }
  const c10::cuda::CUDAGuard on_device(gradient.device());
  CheckLaunch(kernels::LaunchScaleUnlessOne(gradient.mutable_data_ptr(), *dtype, gradient.numel(),
                                            factor.const_data_ptr<float>(),
                                            at::cuda::getCurrentCUDAStream()),
              "the scaling of a gradient");
  return true;
}

bool MultiplyRowsOnGpu(const at::Tensor& rows, const at::Tensor& factors,
                       const at::Tensor& products) {
  const auto dtype = DtypeOf(rows);
  if (!rows.is_cuda() || !dtype.has_value() || factors.scalar_type() != at::kFloat ||
      !factors.is_contiguous() || !products.is_contiguous() || !AreInWholeVectors(rows) ||
      !AreInWholeVectors(products)) {
    return false;
  }
  const c10::cuda::CUDAGuard on_device(rows.device());
  kernels::CopyRowsParams params = CopyOf(rows, products);
  params.factors = factors.const_data_ptr<float>();
  params.dtype = *dtype;
  CheckLaunch(LaunchCopyRows(params, at::cuda::getCurrentCUDAStream()), "rows times their factors");
  return true;
}

}  // namespace logprobd::torch_ops
