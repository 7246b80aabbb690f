#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// Turns JSON as Python's json module writes it into strict JSON: NaN, Infinity and -Infinity
/// outside strings become strings, which no key that is read accepts. Returns INVALID_ARGUMENT for
/// nesting deeper than 64 levels or a NUL.
absl::StatusOr<std::string> StrictJson(absl::string_view text);

}  // namespace logprobd
