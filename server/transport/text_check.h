#pragma once

#include "absl/strings/string_view.h"

namespace logprobd {

/// Whether `text` is well-formed UTF-8: no surrogates, no overlong forms, nothing above U+10FFFF.
bool IsUtf8(absl::string_view text);

/// Whether well-formed `text` holds C0 or C1 control characters or DEL: they could forge log lines
/// and drive terminals.
bool HasControlCharacters(absl::string_view text);

}  // namespace logprobd
