#include "kernels/torch_ops/rows/kernel_operands.h"

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {
namespace {

constexpr int64_t kVectorBytes = 16;

}  // namespace

bool IsAddressAligned(const at::Tensor& values) {
  return reinterpret_cast<uintptr_t>(values.const_data_ptr()) % kVectorBytes == 0;
}

void CheckLaunch(int error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, what,
              " failed: ", cudaGetErrorString(static_cast<cudaError_t>(error)));
}

const float* Floats(const at::Tensor& values) {
  return values.defined() ? values.const_data_ptr<float>() : nullptr;
}

bool IsVectorAligned(const at::Tensor& rows) {
  const auto is_aligned = [&](int64_t elements) {
    return elements * static_cast<int64_t>(rows.element_size()) % kVectorBytes == 0;
  };
  return rows.stride(1) == 1 && is_aligned(rows.size(1)) && rows.stride(0) >= 0 &&
         is_aligned(rows.stride(0)) && IsAddressAligned(rows);
}

kernels::CopyRowsParams CopyParams(const at::Tensor& source, const at::Tensor& rows) {
  const auto element_size = static_cast<int64_t>(source.element_size());
  kernels::CopyRowsParams params;
  params.num_rows = rows.size(0);
  params.source = source.const_data_ptr();
  params.source_stride_bytes = source.stride(0) * element_size;
  params.row_bytes = source.size(1) * element_size;
  params.rows = rows.mutable_data_ptr();
  return params;
}

UpstreamArrays::UpstreamArrays(const UpstreamGradients& upstream) {
  for (const auto score : kUpstreamScores) {
    if ((upstream.*score).has_value()) flat_.*score = Flat(*(upstream.*score));
  }
}

bool UpstreamArrays::AreFp32On(const at::Device& device) const {
  return std::all_of(kUpstreamScores.begin(), kUpstreamScores.end(), [&](const auto score) {
    const MaybeTensor& values = flat_.*score;
    return !values.has_value() ||
           (values->scalar_type() == at::kFloat && values->device() == device);
  });
}

kernels::RowValues UpstreamArrays::Of(MaybeTensor UpstreamGradients::*score) const {
  const MaybeTensor& values = flat_.*score;
  if (!values.has_value()) return {};
  return {values->const_data_ptr<float>(), values->stride(0)};
}

}  // namespace logprobd::torch_ops
