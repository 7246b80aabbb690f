#include "kernels/torch_ops/device_arrays.h"

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/torch_ops/views.h"

namespace logprobd::torch_ops {
namespace {

at::Tensor InOneRow(const std::optional<at::Tensor>& values) {
  return values.has_value() ? Flat(*values) : at::Tensor();
}

bool IsFp32On(const at::Tensor& values, const at::Device& device) {
  return !values.defined() || (values.scalar_type() == at::kFloat && values.device() == device);
}

}  // namespace

void CheckLaunch(int error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, what, ": ",
              cudaGetErrorString(static_cast<cudaError_t>(error)));
}

const float* Floats(const at::Tensor& values) {
  return values.defined() ? values.const_data_ptr<float>() : nullptr;
}

bool AreInWholeVectors(const at::Tensor& rows) {
  constexpr int64_t kVectorBytes = 16;
  const auto is_whole = [&](int64_t elements) {
    return elements * static_cast<int64_t>(rows.element_size()) % kVectorBytes == 0;
  };
  const auto address = reinterpret_cast<uintptr_t>(rows.const_data_ptr());
  return rows.stride(1) == 1 && is_whole(rows.size(1)) && rows.stride(0) >= 0 &&
         is_whole(rows.stride(0)) && address % kVectorBytes == 0;
}

kernels::CopyRowsParams CopyOf(const at::Tensor& source, const at::Tensor& rows) {
  const auto element_size = static_cast<int64_t>(source.element_size());
  kernels::CopyRowsParams params;
  params.num_rows = rows.size(0);
  params.source = source.const_data_ptr();
  params.source_stride_bytes = source.stride(0) * element_size;
  params.row_bytes = source.size(1) * element_size;
  params.rows = rows.mutable_data_ptr();
  return params;
}

UpstreamArrays::UpstreamArrays(const UpstreamGradients& upstream)
    : logprob_(InOneRow(upstream.logprob)),
      entropy_(InOneRow(upstream.entropy)),
      lse_(InOneRow(upstream.lse)),
      mean_logit_(InOneRow(upstream.mean_logit)) {}

bool UpstreamArrays::AreFp32On(const at::Device& device) const {
  return IsFp32On(logprob_, device) && IsFp32On(entropy_, device) && IsFp32On(lse_, device) &&
         IsFp32On(mean_logit_, device);
}

kernels::RowValues UpstreamArrays::Of(const at::Tensor& values) {
  if (!values.defined()) return {};
  return {values.const_data_ptr<float>(), values.stride(0)};
}

}  // namespace logprobd::torch_ops
