#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace logprobd {

/// `text` as the content of an element or of a quoted attribute.
std::string EscapeHtml(absl::string_view text);

/// "780 us" (with the sign of micro), "12.3 ms", "4.56 s", "3 min 20 s", "2 h 5 min", "3 d 4 h".
std::string HumanSeconds(double seconds);

/// "0", "0.25", "7.5", "12,345", "1.25 M", "3.10 G".
std::string HumanNumber(double number);

/// "42%", "0.8%".
std::string HumanShare(double ratio);

}  // namespace logprobd
