#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// Which of a server's heads, by their names, a client means by `name`; empty: the only one.
/// INVALID_ARGUMENT: there are several; NOT_FOUND: there is none of that name. Both name those that
/// there are.
absl::StatusOr<size_t> FindHead(const std::vector<std::string>& names, absl::string_view name);

/// UNAVAILABLE with a retry hint: the weights of head number `index` are being loaded.
absl::Status HeadIsLoading(const std::vector<std::string>& names, size_t index);

}  // namespace logprobd
