#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/app/server_options.h"

namespace logprobd {

/// A value of a flag as found somewhere, not yet checked.
struct Setting {
  const Flag* flag = nullptr;
  /// One; several where a flag of heads is repeated or is an array.
  std::vector<std::string> texts;
  std::string source;  ///< "--batch-rows", "LOGPROBD_BATCH_ROWS", "batch_rows in FILE".
};

/// The settings of a TOML file. Errors name file and key: NOT_FOUND (no such file),
/// INVALID_ARGUMENT (no TOML, unknown key with the nearest known one, a key twice, a wrong type).
absl::StatusOr<std::vector<Setting>> ReadConfigFile(const std::string& path);

/// The settings among the process's environment ("NAME=value" each): LOGPROBD_BATCH_ROWS for
/// --batch-rows. INVALID_ARGUMENT for a LOGPROBD_ variable that neither server nor client knows.
absl::StatusOr<std::vector<Setting>> ReadEnvironment(absl::Span<const std::string> environment);

}  // namespace logprobd
