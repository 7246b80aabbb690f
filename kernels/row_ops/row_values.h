#pragma once

#include <cstdint>

namespace logprobd::kernels {

/// One number a row, in device memory; expanded ones have the stride 0.
struct RowValues {
  const float* values = nullptr;  ///< Null: none, which counts as 0.
  int64_t stride = 1;             ///< Elements.
};

}  // namespace logprobd::kernels
