#pragma once

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"

namespace CLI {
class App;
}  // namespace CLI

namespace logprobd::client {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;

/// Where a command writes: results to `out`, the rest to `err`.
struct CommandStreams {
  std::ostream& out;
  std::ostream& err;
  bool is_terminal = false;  ///< Whether `err` is one, for progress.
};

/// What every command takes.
struct CommonOptions {
  std::string address = "127.0.0.1:8470";
  absl::Duration timeout = absl::Seconds(60);
  bool json = false;
};

/// The command that was chosen and what came of it.
struct CommandState {
  CommandStreams streams;
  std::vector<std::string> arguments = {};  ///< After the program's name.
  int exit_code = kExitOk;
};

/// Adds --address, --timeout and --json to a command.
void AddCommonOptions(CLI::App& command, CommonOptions& options);

/// A number of seconds, or with a unit: 30, 1.5s, 500ms, 2m. INVALID_ARGUMENT otherwise.
absl::StatusOr<absl::Duration> ParseDurationText(const std::string& text);

/// Adds an option that takes ParseDurationText's form; a malformed one is a usage error.
void AddDurationOption(CLI::App& command, const std::string& name, absl::Duration& value,
                       const std::string& description, const std::string& environment = "");

/// Prints the error (as JSON to `out` when asked) and returns the exit code.
int ReportError(const CommandStreams& streams, const CommonOptions& options,
                const absl::Status& status);

/// A client for the common options.
absl::StatusOr<std::unique_ptr<Client>> Connect(const CommonOptions& options,
                                                Client::Options client_options = {});

void AddPingCommand(CLI::App& app, CommandState& state);
void AddInfoCommand(CLI::App& app, CommandState& state);
void AddScoreCommand(CLI::App& app, CommandState& state);
void AddSelftestCommand(CLI::App& app, CommandState& state);
void AddBenchCommand(CLI::App& app, CommandState& state);
void AddWeightsCommand(CLI::App& app, CommandState& state);

/// Runs logprobctl with the arguments after the program's name; returns the exit code: 0, 1 for a
/// failure, 2 for a command line that was not understood.
int RunCli(const std::vector<std::string>& arguments, const CommandStreams& streams);

}  // namespace logprobd::client
