#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace logprobd {

/// A name out of a file as it may stand in a message: in single quotes, control characters and
/// broken UTF-8 escaped, cut after 160 bytes.
std::string PrintableName(absl::string_view name);

}  // namespace logprobd
