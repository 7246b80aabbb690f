#include "kernels/torch_ops/fused_row_loss.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>

#include "kernels/row_ops/row_loss.h"
#include "kernels/torch_ops/device_arrays.h"

namespace logprobd::torch_ops {

std::optional<at::Tensor> RowLossOnGpu(const LinearLogprobOutputs& scores,
                                       const UpstreamGradients& weights) {
  const at::Tensor& any = scores.logprob;
  const UpstreamArrays arrays(weights);
  if (!any.is_cuda() || any.scalar_type() != at::kFloat || !arrays.AreFp32On(any.device())) {
    return std::nullopt;
  }
  const c10::cuda::CUDAGuard on_device(any.device());
  const auto in_line = [](const at::Tensor& values) {
    return values.defined() ? values.contiguous() : values;
  };
  const at::Tensor logprob = in_line(scores.logprob);
  const at::Tensor entropy = in_line(scores.entropy);
  const at::Tensor lse = in_line(scores.lse);
  const at::Tensor mean_logit = in_line(scores.mean_logit);
  if (mean_logit.defined() && mean_logit.scalar_type() != at::kFloat) return std::nullopt;
  at::Tensor loss = at::empty({}, any.options());
  kernels::RowLossParams params;
  params.num_rows = any.size(0);
  params.scores[0] = {Floats(logprob), arrays.logprob()};
  params.scores[1] = {Floats(entropy), arrays.entropy()};
  params.scores[2] = {Floats(lse), arrays.lse()};
  params.scores[3] = {Floats(mean_logit), arrays.mean_logit()};
  params.loss = loss.mutable_data_ptr<float>();
  CheckLaunch(LaunchRowLoss(params, at::cuda::getCurrentCUDAStream()), "the loss");
  return loss;
}

}  // namespace logprobd::torch_ops
