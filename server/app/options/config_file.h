#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/app/options/flags.h"

namespace logprobd {

/// A flag's value as found in one source, not yet checked.
struct Setting {
  const Flag* flag = nullptr;
  /// One text, or several if a flag that heads can set is repeated or is an array.
  std::vector<std::string> texts;
  std::string source;  ///< "--batch-rows", "LOGPROBD_BATCH_ROWS" or "batch_rows in FILE".
};

/// Reads the settings of a TOML file. Errors name the file and the key:
///   NOT_FOUND          the file does not exist.
///   PERMISSION_DENIED  the file cannot be read.
///   INVALID_ARGUMENT   the file is not TOML, or has an unknown key (the message names the nearest
///                      flag), a key twice or a value of the wrong type.
absl::StatusOr<std::vector<Setting>> ReadConfigFile(const std::string& path);

}  // namespace logprobd
