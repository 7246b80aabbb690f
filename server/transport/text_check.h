#pragma once

#include "absl/strings/string_view.h"

namespace logprobd {

/// Whether well-formed `text` holds C0 or C1 control characters or DEL: they could forge log lines
/// and drive terminals.
bool HasControlCharacters(absl::string_view text);

}  // namespace logprobd
