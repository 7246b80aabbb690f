#pragma once

#include <string>
#include <toml.hpp>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// Parses a TOML file of at most 1 MiB. `what`, such as "configuration file", begins the errors:
/// NOT_FOUND, PERMISSION_DENIED, or INVALID_ARGUMENT for a file that is not regular, too large or
/// not TOML.
absl::StatusOr<toml::value> ParseTomlFile(absl::string_view what, const std::string& path);

/// Joins the lines of a text, so that it fits into an error message.
std::string OneLine(absl::string_view text);

}  // namespace logprobd
