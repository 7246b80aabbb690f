#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace logprobd::client {

/// The outputs that --outputs can name, in the order of the columns.
const std::vector<std::string>& OutputNames();

/// The output:: bits of the names; "all" is every one. INVALID_ARGUMENT lists the names.
absl::StatusOr<uint32_t> ParseOutputs(const std::vector<std::string>& names);

}  // namespace logprobd::client
