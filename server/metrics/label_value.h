#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace logprobd {

/// `text` made safe as a label's value: control characters and bytes that are not UTF-8 become '_',
/// and it is cut to 128 bytes. Names come from model folders, and one bad byte would make
/// Prometheus refuse the whole scrape.
std::string LabelValue(absl::string_view text);

}  // namespace logprobd
