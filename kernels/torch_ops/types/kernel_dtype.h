#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "kernels/common/dtype.h"

namespace logprobd::torch_ops {

/// Returns the kernels' name of a dtype, or nothing for one that no kernel reads.
inline std::optional<kernels::Dtype> KernelDtype(at::ScalarType dtype) {
  switch (dtype) {
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

}  // namespace logprobd::torch_ops
