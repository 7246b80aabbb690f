#include "server/metrics/label_value.h"

#include <cstddef>

namespace logprobd {
namespace {

constexpr size_t kLabelBytesMax = 128;

/// Length of the UTF-8 sequence at the start of `text`, or 0 where there is none. Overlong forms,
/// surrogates and values beyond U+10FFFF are none.
size_t SequenceLength(absl::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) {
    return 1;
  }
  const size_t length = byte(0) >= 0xF0 ? 4 : byte(0) >= 0xE0 ? 3 : 2;
  if (byte(0) < 0xC2 || byte(0) > 0xF4 || text.size() < length) {
    return 0;
  }
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) {
      return 0;
    }
  }
  const bool overlong = (byte(0) == 0xE0 && byte(1) < 0xA0) || (byte(0) == 0xF0 && byte(1) < 0x90);
  const bool beyond = (byte(0) == 0xED && byte(1) > 0x9F) || (byte(0) == 0xF4 && byte(1) > 0x8F);
  return overlong || beyond ? 0 : length;
}

}  // namespace

std::string LabelValue(absl::string_view text) {
  std::string value;
  while (!text.empty()) {
    const auto first = static_cast<unsigned char>(text[0]);
    const size_t length = SequenceLength(text);
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
