#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/base/head_info.h"

namespace logprobd {

/// How a GPU is called in ShardPlace::device and MemoryUse::place: "gpu3" for CUDA ordinal 3.
std::string GpuName(int32_t ordinal);

/// The ordinal of a GPU's name; nothing for the name of something else.
std::optional<int32_t> GpuOrdinal(absl::string_view name);

/// The ordinals of the GPUs that `places` name, each once, in order of first use.
std::vector<int32_t> GpusOf(absl::Span<const ShardPlace> places);

/// Whether kernels of one GPU wait for another's: a head in shards. Those on a CPU are threads, all
/// of which the system lets run.
bool WaitsForPeers(absl::Span<const ShardPlace> places);

}  // namespace logprobd
