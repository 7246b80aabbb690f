#include "server/transport/text_check.h"

#include <cstddef>
#include <cstdint>

namespace logprobd {

bool HasControlCharacters(absl::string_view text) {
  for (size_t index = 0; index < text.size(); ++index) {
    const auto byte = static_cast<uint8_t>(text[index]);
    if (byte < 0x20 || byte == 0x7F) {
      return true;
    }
    // C1 controls are C2 80 to C2 9F.
    if (byte == 0xC2 && index + 1 < text.size() && static_cast<uint8_t>(text[index + 1]) < 0xA0) {
      return true;
    }
  }
  return false;
}

}  // namespace logprobd
