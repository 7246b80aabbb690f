#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "kernels/torch_ops/row_selection.h"

namespace logprobd::torch_ops {

/// Whether the work of the device's current stream is captured in a graph: nobody may wait then.
bool IsCaptured(const at::Device& device);

/// Starts what CompactRows does, by one kernel, for targets on a GPU and gradients in fp32; else
/// null. One that is awaited has no counted places. Not while a graph is captured.
std::shared_ptr<RowCompaction> StartRowCompaction(const at::Tensor& target, int64_t ignore_index,
                                                  const UpstreamGradients& upstream, IdRange owned,
                                                  Search search);

}  // namespace logprobd::torch_ops
