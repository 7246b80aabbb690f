#pragma once

#include <optional>

#include "absl/strings/string_view.h"
#include "server/base/head_info.h"

namespace logprobd {

/// The served type of a safetensors dtype name, or nothing for one that heads cannot have.
inline std::optional<Dtype> ServedDtype(absl::string_view name) {
  if (name == "BF16") {
    return Dtype::kBf16;
  }
  if (name == "F16") {
    return Dtype::kF16;
  }
  if (name == "F32") {
    return Dtype::kF32;
  }
  return std::nullopt;
}

}  // namespace logprobd
