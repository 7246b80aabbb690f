#pragma once

#include <cstdint>

namespace logprobd::kernels {

enum class Dtype : int32_t { kBf16, kF16, kF32 };

constexpr int64_t DtypeBytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

}  // namespace logprobd::kernels
