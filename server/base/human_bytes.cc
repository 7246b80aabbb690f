#include "server/base/human_bytes.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace logprobd {

std::string HumanBytes(int64_t bytes) {
  constexpr std::pair<int64_t, absl::string_view> kUnits[] = {
      {int64_t{1} << 30, "GiB"}, {int64_t{1} << 20, "MiB"}, {int64_t{1} << 10, "KiB"}};
  for (const auto& [one, unit] : kUnits) {
    if (bytes >= 10 * one || (bytes >= one && one > 1024)) {
      return absl::StrFormat("%.1f %s", static_cast<double>(bytes) / static_cast<double>(one),
                             unit);
    }
  }
  return absl::StrCat(bytes, " B");
}

}  // namespace logprobd
