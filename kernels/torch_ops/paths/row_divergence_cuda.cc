// Computes divergences and gradients with the kernels of kernels/divergence.

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>

#include "kernels/divergence/divergence.h"
#include "kernels/torch_ops/paths/row_divergence.h"
#include "kernels/torch_ops/rows/kernel_operands.h"
#include "kernels/torch_ops/types/kernel_dtype.h"

namespace logprobd::torch_ops {
namespace {

using kernels::DivergenceStatistics;
static_assert(sizeof(DivergenceStatistics) == kNumStatistics * sizeof(double));

kernels::DivergenceModel ModelOf(const at::Tensor& dots, const DivergenceHead& head) {
  kernels::DivergenceModel model;
  model.dots = dots.const_data_ptr<float>();
  model.row_stride = dots.stride(0);
  model.bias = Floats(head.bias);
  model.transform = {static_cast<float>(head.scale), static_cast<float>(head.softcap)};
  return model;
}

kernels::DivergenceRowsParams RowsParams(const DivergenceBlock& block) {
  kernels::DivergenceRowsParams params;
  params.num_rows = block.student_dots.size(0);
  params.num_columns = block.student_dots.size(1);
  params.kind = block.kind;
  params.beta = block.beta;
  params.student = ModelOf(block.student_dots, block.student);
  params.teacher = ModelOf(block.teacher_dots, block.teacher);
  params.temperatures = block.temperature.const_data_ptr<double>();
  return params;
}

class CudaKernels : public RowDivergence {
 public:
  void Sum(const DivergenceBlock& block, const at::Tensor& statistics) const override {
    const c10::cuda::CUDAGuard on_device(statistics.device());
    auto* const rows =
        reinterpret_cast<DivergenceStatistics*>(statistics.mutable_data_ptr<double>());
    CheckLaunch(LaunchDivergenceSums(RowsParams(block), rows, c10::cuda::getCurrentCUDAStream()),
                "the sums of divergences");
  }

  void FormGradient(const DivergenceBlock& block, const at::Tensor& statistics,
                    const DivergenceCoefficients& coefficients,
                    const at::Tensor& gradient) const override {
    const c10::cuda::CUDAGuard on_device(statistics.device());
    const auto doubles = [](const at::Tensor& values) {
      return values.defined() ? values.const_data_ptr<double>() : nullptr;
    };
    kernels::DivergenceGradientParams params;
    params.rows = RowsParams(block);
    params.statistics =
        reinterpret_cast<const DivergenceStatistics*>(statistics.const_data_ptr<double>());
    params.d_divergence = doubles(coefficients.divergence);
    params.d_entropy = doubles(coefficients.entropy);
    params.dtype = *KernelDtype(gradient.scalar_type());
    params.gradients = gradient.mutable_data_ptr();
    params.gradient_stride = gradient.stride(0);
    CheckLaunch(LaunchDivergenceGradient(params, c10::cuda::getCurrentCUDAStream()),
                "the gradients of divergences");
  }
};

}  // namespace

const RowDivergence& CudaRowDivergence() {
  static const CudaKernels with_kernels;
  return with_kernels;
}

}  // namespace logprobd::torch_ops
