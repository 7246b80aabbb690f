#pragma once

#include "absl/strings/string_view.h"

namespace logprobd {

/// Returns the text of client/python/logprobd/head_rules.json, which CMake compiles in.
absl::string_view HeadRulesJson();

}  // namespace logprobd
