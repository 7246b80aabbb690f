#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "kernels/common/tile.h"
#include "server/app/plan.h"
#include "server/base/text.h"

namespace logprobd {
namespace {

void AppendLine(std::string& text, absl::string_view name, const std::string& value) {
  absl::StrAppendFormat(&text, "%-12s %s\n", name, value);
}

std::string NumberOrNone(float value, float none) {
  return value == none ? "none" : absl::StrCat(value);
}

void AppendLayout(std::string& text, const std::vector<ShardPlace>& layout) {
  for (const ShardPlace& place : layout) {
    const int64_t num_tiles = kernels::NumTiles(place.vocab_end - place.vocab_begin);
    AppendLine(text, "layout",
               absl::StrFormat("replica %d shard %d  %-5s  ids %d to %d (%d tile%s)", place.replica,
                               place.shard, place.device, place.vocab_begin, place.vocab_end,
                               num_tiles, num_tiles == 1 ? "" : "s"));
  }
}

/// " of 139.0 GiB free"; empty where it is not known.
std::string ThereText(const MemoryPlan& there, absl::string_view place) {
  const int64_t bytes = TotalBytes(there, place);
  return bytes == 0 ? "" : absl::StrCat("  of ", HumanBytes(bytes), " free");
}

void AppendMemory(std::string& text, const MemoryPlan& memory, const MemoryPlan& there) {
  std::vector<std::string> places;
  for (const MemoryUse& use : memory) {
    if (std::find(places.begin(), places.end(), use.place) == places.end()) {
      places.push_back(use.place);
    }
  }
  for (const std::string& place : places) {
    for (const MemoryUse& use : memory) {
      if (use.place == place) {
        AppendLine(
            text, "memory",
            absl::StrFormat("%-5s %-10s %10s%s", place, use.kind, HumanBytes(use.bytes),
                            use.kind == "receive" || use.kind == "shared" ? "  (at most)" : ""));
      }
    }
    AppendLine(text, "memory",
               absl::StrFormat("%-5s %-10s %10s%s", place, "total",
                               HumanBytes(TotalBytes(memory, place)), ThereText(there, place)));
  }
}

/// All but its memory and warnings.
void AppendHead(std::string& text, const ServingPlan& plan) {
  const HeadInfo& head = plan.head;
  AppendLine(text, "head", head.name);
  AppendLine(text, "model type", head.model_type);
  AppendLine(text, "tensor", absl::StrCat(head.tensor, head.tied ? " (tied)" : ""));
  AppendLine(text, "version", absl::StrCat(head.weights_version));
  AppendLine(text, "hidden", absl::StrCat(head.hidden_size));
  AppendLine(text, "vocabulary",
             absl::StrCat(head.vocab_rows, " rows, ", head.vocab_size, " valid"));
  AppendLine(text, "scale", NumberOrNone(head.scale, 1));
  AppendLine(text, "cap", NumberOrNone(head.softcap, 0));
  AppendLine(text, "bias", head.has_bias ? "yes" : "none");
  AppendLine(text, "dtype", std::string(DtypeName(head.dtype)));
  AppendLine(text, "weight",
             absl::StrCat(HumanBytes(head.weight_bytes), " (", head.weight_bytes, " bytes)"));
  AppendLine(text, "engine", absl::StrCat(plan.engine.engine, ": ", plan.engine.reason));
  AppendLayout(text, plan.engine.layout);
}

void AppendWarnings(std::string& text, const ServingPlan& plan) {
  for (const std::string& warning : plan.warnings) {
    AppendLine(text, "warning", warning);
  }
}

}  // namespace

std::string PlanText(const ServerPlan& plan) {
  std::string text;
  if (plan.heads.size() == 1) {
    AppendHead(text, plan.heads.front());
    AppendMemory(text, plan.memory(), plan.there);
    AppendWarnings(text, plan.heads.front());
    return text;
  }
  for (const ServingPlan& head : plan.heads) {
    AppendHead(text, head);
    AppendMemory(text, head.memory, {});
    AppendWarnings(text, head);
    text.push_back('\n');
  }
  AppendLine(text, "all heads",
             absl::StrJoin(plan.heads, ", ", [](std::string* out, const ServingPlan& head) {
               out->append(head.head.name);
             }));
  AppendMemory(text, plan.memory(), plan.there);
  return text;
}

}  // namespace logprobd
