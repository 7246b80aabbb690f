#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "kernels/torch_ops/row_selection.h"

namespace logprobd::torch_ops {

/// SelectRows by one kernel, for targets on a GPU and gradients in fp32; else nothing. While the
/// stream is captured in a graph nobody may wait: all rows are selected.
std::optional<RowSelection> SelectRowsOnGpu(const at::Tensor& target, int64_t ignore_index,
                                            const UpstreamGradients& upstream, IdRange owned);

}  // namespace logprobd::torch_ops
