#include "server/base/head_info.h"

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace logprobd {
namespace {

constexpr absl::string_view kGpuPrefix = "gpu";

}  // namespace

std::string GpuName(int32_t ordinal) { return absl::StrCat(kGpuPrefix, ordinal); }

std::optional<int32_t> GpuOrdinal(absl::string_view name) {
  int32_t ordinal = 0;
  if (!absl::ConsumePrefix(&name, kGpuPrefix) || !absl::SimpleAtoi(name, &ordinal)) {
    return std::nullopt;
  }
  return ordinal;
}

std::vector<int32_t> GpusOf(absl::Span<const ShardPlace> places) {
  std::vector<int32_t> gpus;
  for (const ShardPlace& place : places) {
    const std::optional<int32_t> gpu = GpuOrdinal(place.device);
    if (gpu.has_value() && !absl::c_linear_search(gpus, *gpu)) gpus.push_back(*gpu);
  }
  return gpus;
}

bool WaitsForPeers(absl::Span<const ShardPlace> places) {
  return absl::c_any_of(places, [](const ShardPlace& place) {
    return place.shard > 0 && GpuOrdinal(place.device).has_value();
  });
}

}  // namespace logprobd
