#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace logprobd {

/// How a GPU is called in ShardPlace::device and MemoryUse::place: "gpu3" for CUDA ordinal 3.
std::string GpuName(int32_t ordinal);

/// The ordinal of a GPU's name; nothing for the name of something else.
std::optional<int32_t> GpuOrdinal(absl::string_view name);

}  // namespace logprobd
