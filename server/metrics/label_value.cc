#include "server/metrics/label_value.h"

#include <cstddef>

#include "server/base/text.h"

namespace logprobd {
namespace {

constexpr size_t kLabelBytesMax = 128;

}  // namespace

std::string LabelValue(absl::string_view text) {
  std::string value;
  while (!text.empty()) {
    const auto first = static_cast<unsigned char>(text[0]);
    const size_t length = Utf8SequenceLength(text);
    const bool keep = length > 0 && first >= 0x20 && first != 0x7F;
    const size_t width = keep ? length : 1;
    if (value.size() + width > kLabelBytesMax) {
      break;
    }
    if (keep) {
      value.append(text.data(), length);
    } else {
      value.push_back('_');
    }
    text.remove_prefix(width);
  }
  return value;
}

}  // namespace logprobd
