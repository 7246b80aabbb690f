#include "server/http/html_text.h"

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace logprobd {
namespace {

constexpr int64_t kMinute = 60;
constexpr int64_t kHour = 60 * kMinute;
constexpr int64_t kDay = 24 * kHour;

std::string WithThousands(int64_t number) {
  std::string digits = absl::StrCat(number);
  for (size_t place = digits.size(); place > 3;) {
    place -= 3;
    digits.insert(place, 1, ',');
  }
  return digits;
}

}  // namespace

std::string EscapeHtml(absl::string_view text) {
  return absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

std::string HumanSeconds(double seconds) {
  if (seconds == 0) {
    return "0";
  }
  if (seconds < 0.9995e-3) {
    return absl::StrFormat("%.3g µs", seconds * 1e6);
  }
  if (seconds < 0.9995) {
    return absl::StrFormat("%.3g ms", seconds * 1e3);
  }
  if (seconds < kMinute) {
    return absl::StrFormat("%.3g s", seconds);
  }
  const auto whole = static_cast<int64_t>(seconds);
  if (whole < kHour) {
    return absl::StrCat(whole / kMinute, " min ", whole % kMinute, " s");
  }
  if (whole < kDay) {
    return absl::StrCat(whole / kHour, " h ", whole % kHour / kMinute, " min");
  }
  return absl::StrCat(whole / kDay, " d ", whole % kDay / kHour, " h");
}

std::string HumanNumber(double number) {
  if (number < 10) {
    return absl::StrFormat("%.2g", number);
  }
  if (number < 1e6) {
    return WithThousands(std::llround(number));
  }
  return number < 1e9 ? absl::StrFormat("%.2f M", number / 1e6)
                      : absl::StrFormat("%.2f G", number / 1e9);
}

std::string HumanShare(double ratio) {
  return ratio > 0 && ratio < 0.1 ? absl::StrFormat("%.1f%%", ratio * 100)
                                  : absl::StrFormat("%.0f%%", ratio * 100);
}

}  // namespace logprobd
