#include "kernels/torch_ops/rows/device_ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "kernels/torch_ops/types/loss.h"

namespace logprobd::torch_ops {
namespace {

/// Returns a bool [all rows] that is true where an upstream gradient is not zero, or an undefined
/// tensor if there are no upstream gradients.
at::Tensor HasGradient(const UpstreamGradients& upstream) {
  at::Tensor has_gradient;
  for (const auto score : kUpstreamScores) {
    const MaybeTensor& gradient = upstream.*score;
    if (!gradient.has_value()) continue;
    const at::Tensor is_nonzero = gradient->reshape({-1}) != 0;
    has_gradient = has_gradient.defined() ? has_gradient.logical_or(is_nonzero) : is_nonzero;
  }
  return has_gradient;
}

}  // namespace

const DeviceOps& DeviceOps::For(at::DeviceType type) {
  static const DeviceOps host;
  if constexpr (LOGPROBD_TORCH_OPS_CUDA != 0) {
    if (type == at::kCUDA) return CudaDeviceOps();
  }
  return host;
}

int64_t DeviceOps::FreeBytes(int64_t /*device*/, int64_t /*enough*/) const { return 0; }

bool DeviceOps::IsCapturing(at::Device /*device*/) const { return false; }

bool IsCapturing(at::Device device) { return DeviceOps::For(device.type()).IsCapturing(device); }

bool IsCapturing(const at::Tensor& on_device) { return IsCapturing(on_device.device()); }

c10::Event RecordEvent(at::Device device) {
  c10::Event event(device.type());
  event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

RowSubset DeviceOps::CompactRows(const at::Tensor& target, int64_t ignore_index,
                                 const UpstreamGradients& upstream, IdRange ids,
                                 Wait /*wait*/) const {
  at::Tensor is_in_subset = target != ignore_index;
  RowSubset subset;
  if (const at::Tensor has_gradient = HasGradient(upstream); has_gradient.defined()) {
    subset.has_every_valid_row =
        has_gradient.logical_or(is_in_subset.logical_not()).all().item<bool>();
    is_in_subset.logical_and_(has_gradient);
  }
  const at::Tensor row_indices = at::nonzero(is_in_subset).squeeze(1);
  if (row_indices.size(0) < target.size(0)) subset.row_indices = row_indices;
  const at::Tensor is_out_of_vocab =
      is_in_subset.logical_and(target.lt(ids.begin) + target.ge(ids.end));
  const at::Tensor out_of_vocab = at::nonzero(is_out_of_vocab).squeeze(1);
  subset.num_out_of_vocab = out_of_vocab.size(0);
  if (subset.num_out_of_vocab > 0) subset.first_out_of_vocab = out_of_vocab[0].item<int64_t>();
  if (row_indices.size(0) > 0) {
    const auto [min, max] = target.index_select(0, row_indices).aminmax();
    subset.targets = IdRange::From(min.item<int64_t>(), max.item<int64_t>());
  }
  const at::Tensor row_numbers = at::arange(1, target.size(0) + 1, target.options());
  subset.target_checksum = (target * row_numbers).sum().item<int64_t>();
  return subset;
}

at::Tensor DeviceOps::SumLoss(const LinearLogprobOutputs& scores,
                              const UpstreamGradients& coefficients) const {
  at::Tensor loss = at::zeros({}, scores.logprob.options().dtype(at::kDouble));
  for (const LossScore& score : kLossScores) {
    const MaybeTensor& coefficient = coefficients.*score.upstream;
    if (!coefficient.has_value()) continue;
    const at::Tensor wide = coefficient->to(at::kDouble);
    loss += at::where(wide == 0, 0, wide * (scores.*score.output)).sum();
  }
  return loss;
}

void DeviceOps::MultiplyRows(const at::Tensor& rows, const at::Tensor& factors,
                             at::Tensor& products) const {
  at::mul_out(products, rows, factors);
}

void DeviceOps::Scale(at::Tensor& gradient, const at::Tensor& factor) const {
  // Reading a factor on a GPU would wait for the GPU.
  if (factor.is_cpu() && factor.item<double>() == 1) return;
  gradient.mul_(factor.reshape({}));
}

}  // namespace logprobd::torch_ops
