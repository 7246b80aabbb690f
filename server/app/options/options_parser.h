#pragma once

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/app/options/server_options.h"

namespace logprobd {

struct ParsedOptions {
  ServerOptions options;
  /// Source of each flag's value, by the flag's name. It is "default" if no source sets the flag.
  std::map<std::string, std::string, std::less<>> sources;
  bool help = false;
};

/// Reads all settings. The command line (without the program's name) has precedence over the
/// environment ("NAME=value" each), the environment over the file of --config, and the file over
/// the defaults. An error is one line that names the flag, variable or key and says what it must
/// be. CheckServerOptions, which checks flags together, is a separate step.
absl::StatusOr<ParsedOptions> ParseOptions(absl::Span<const std::string> arguments,
                                           absl::Span<const std::string> environment);

/// Returns the text of --help: every flag in its group with meaning, unit, range and default.
std::string HelpText();

/// Returns all settings as a configuration file, each with its source as a comment. Reading the
/// text back gives the same settings.
std::string ConfigText(const ParsedOptions& parsed);

}  // namespace logprobd
