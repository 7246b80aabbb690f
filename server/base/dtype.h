#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace logprobd {

/// Element type of hidden states and of a head's weight. Values are those of proto Dtype.
enum class Dtype : int32_t { kBf16 = 1, kF16 = 2, kF32 = 3 };

constexpr int64_t DtypeBytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

constexpr absl::string_view DtypeName(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return "bf16";
    case Dtype::kF16:
      return "f16";
    case Dtype::kF32:
      return "f32";
  }
  return "unknown";
}

}  // namespace logprobd
