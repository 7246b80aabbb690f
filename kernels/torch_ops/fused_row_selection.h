#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "kernels/torch_ops/row_selection.h"

namespace logprobd::torch_ops {

/// Whether the work of the device's current stream is captured in a graph: nobody may wait then.
bool IsCaptured(const at::Device& device);

/// StartRowSearch by one kernel, for targets on a GPU and gradients in fp32, where no graph is
/// captured; else null.
std::shared_ptr<RowSearch> StartRowSearchOnGpu(const at::Tensor& target, int64_t ignore_index,
                                               const UpstreamGradients& upstream, IdRange owned);

}  // namespace logprobd::torch_ops
