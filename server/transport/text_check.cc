#include "server/transport/text_check.h"

#include <cstddef>
#include <cstdint>

namespace logprobd {
namespace {

uint8_t ByteAt(absl::string_view text, size_t index) { return static_cast<uint8_t>(text[index]); }

/// Length of the well-formed sequence at `index`, or 0.
size_t SequenceLength(absl::string_view text, size_t index) {
  const uint8_t lead = ByteAt(text, index);
  if (lead < 0x80) {
    return 1;
  }
  size_t length = 0;
  // The second byte's range is narrower after some lead bytes: that shuts out overlong forms
  // (E0, F0), surrogates (ED) and what lies above U+10FFFF (F4).
  uint8_t second_min = 0x80;
  uint8_t second_max = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    second_min = lead == 0xE0 ? 0xA0 : 0x80;
    second_max = lead == 0xED ? 0x9F : 0xBF;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    second_min = lead == 0xF0 ? 0x90 : 0x80;
    second_max = lead == 0xF4 ? 0x8F : 0xBF;
  } else {
    return 0;
  }
  if (index + length > text.size()) {
    return 0;
  }
  const uint8_t second = ByteAt(text, index + 1);
  if (second < second_min || second > second_max) {
    return 0;
  }
  for (size_t i = 2; i < length; ++i) {
    if ((ByteAt(text, index + i) & 0xC0) != 0x80) {
      return 0;
    }
  }
  return length;
}

}  // namespace

bool IsUtf8(absl::string_view text) {
  for (size_t index = 0; index < text.size();) {
    const size_t length = SequenceLength(text, index);
    if (length == 0) {
      return false;
    }
    index += length;
  }
  return true;
}

bool HasControlCharacters(absl::string_view text) {
  for (size_t index = 0; index < text.size(); ++index) {
    const uint8_t byte = ByteAt(text, index);
    if (byte < 0x20 || byte == 0x7F) {
      return true;
    }
    // C1 controls are C2 80 to C2 9F.
    if (byte == 0xC2 && index + 1 < text.size() && ByteAt(text, index + 1) < 0xA0) {
      return true;
    }
  }
  return false;
}

}  // namespace logprobd
