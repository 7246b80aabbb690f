#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/app/server_options.h"

namespace logprobd {

struct ParsedOptions {
  ServerOptions options;
  /// Where each flag's value came from, by the flag's name; "default" where nothing set it.
  std::map<std::string, std::string, std::less<>> sources;
  bool help = false;
};

/// Reads the command line (without the program's name) over the environment ("NAME=value" each)
/// over the file of --config over the defaults. Errors are one line that names the flag, variable
/// or key and what it must be. Checks of several flags together (CheckServerOptions) are not made
/// here.
absl::StatusOr<ParsedOptions> ParseOptions(absl::Span<const std::string> arguments,
                                           absl::Span<const std::string> environment);

/// Text of --help: every flag in its group, with unit and default.
std::string HelpText();

/// All settings as a configuration file, each with where it came from. Reading it back gives the
/// same settings.
std::string ConfigText(const ParsedOptions& parsed);

}  // namespace logprobd
