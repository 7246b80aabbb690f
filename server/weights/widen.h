#pragma once

#include <cstddef>
#include <vector>

#include "absl/types/span.h"
#include "server/base/head_info.h"

namespace logprobd {

/// Converts values as files store them, little-endian, to fp32. The size of `bytes` must be a
/// multiple of the size of `dtype`.
std::vector<float> Widen(absl::Span<const std::byte> bytes, Dtype dtype);

}  // namespace logprobd
