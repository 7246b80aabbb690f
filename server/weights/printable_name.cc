#include "server/weights/printable_name.h"

#include <cstddef>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

constexpr size_t kNameBytesMax = 160;

bool IsContinuationByte(char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) == 0x80U; }

}  // namespace

std::string PrintableName(absl::string_view name) {
  if (name.size() <= kNameBytesMax) {
    return absl::StrCat("'", absl::Utf8SafeCHexEscape(name), "'");
  }
  size_t end = kNameBytesMax;
  while (end > 0 && IsContinuationByte(name[end])) {
    --end;
  }
  return absl::StrCat("'", absl::Utf8SafeCHexEscape(name.substr(0, end)), "...' (", name.size(),
                      " bytes)");
}

}  // namespace logprobd
