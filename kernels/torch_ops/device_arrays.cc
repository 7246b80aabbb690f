#include "kernels/torch_ops/device_arrays.h"

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

namespace logprobd::torch_ops {
namespace {

at::Tensor InOneRow(const std::optional<at::Tensor>& values) {
  return values.has_value() ? values->reshape({-1}) : at::Tensor();
}

bool IsFp32(const at::Tensor& values) {
  return !values.defined() || values.scalar_type() == at::kFloat;
}

}  // namespace

void CheckLaunch(int error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, what, ": ",
              cudaGetErrorString(static_cast<cudaError_t>(error)));
}

const float* Floats(const at::Tensor& values) {
  return values.defined() ? values.const_data_ptr<float>() : nullptr;
}

UpstreamArrays::UpstreamArrays(const UpstreamGradients& upstream)
    : logprob_(InOneRow(upstream.logprob)),
      entropy_(InOneRow(upstream.entropy)),
      lse_(InOneRow(upstream.lse)),
      mean_logit_(InOneRow(upstream.mean_logit)) {}

bool UpstreamArrays::are_fp32() const {
  return IsFp32(logprob_) && IsFp32(entropy_) && IsFp32(lse_) && IsFp32(mean_logit_);
}

kernels::RowValues UpstreamArrays::Of(const at::Tensor& values) {
  if (!values.defined()) return {};
  return {values.const_data_ptr<float>(), values.stride(0)};
}

}  // namespace logprobd::torch_ops
