#pragma once

#include "kernels/common/dtype.h"
#include "server/base/head_info.h"

namespace logprobd {

/// The same type as kernels/ name it.
constexpr kernels::Dtype KernelDtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return kernels::Dtype::kBf16;
    case Dtype::kF16:
      return kernels::Dtype::kF16;
    case Dtype::kF32:
      break;
  }
  return kernels::Dtype::kF32;
}

}  // namespace logprobd
