#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// JSON as Python's json module writes it, made strict: NaN, Infinity and -Infinity outside strings
/// become null. INVALID_ARGUMENT for nesting deeper than 64 levels or a NUL.
absl::StatusOr<std::string> StrictJson(absl::string_view text);

}  // namespace logprobd
