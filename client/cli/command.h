#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "nlohmann/json.hpp"

namespace CLI {
class App;
}  // namespace CLI

namespace logprobd::client {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;

/// Output streams of a command: results are written to `out`, everything else to `err`.
struct CommandStreams {
  std::ostream& out;
  std::ostream& err;
  bool is_terminal = false;  ///< True when `err` is a terminal; progress is shown only then.
};

/// Options that every command has.
struct CommonOptions {
  std::string address = "127.0.0.1:8470";
  absl::Duration timeout = absl::Seconds(60);
  std::optional<Tls> tls;  ///< Set by any of the --tls options.
  std::string token;       ///< From --token-file or LOGPROBD_TOKEN; empty means none.
  bool json = false;
};

/// State of one run of the program.
struct CommandState {
  CommandStreams streams;
  std::vector<std::string> arguments = {};  ///< All arguments after the program's name.
  int exit_code = kExitOk;                  ///< Set by the command that ran.
};

/// Adds --address, --timeout and --json to a command.
void AddCommonOptions(CLI::App& command, CommonOptions& options);

/// Adds --token-file, --tls and the other --tls options, which AddCommonOptions includes.
void AddSecurityOptions(CLI::App& command, CommonOptions& options);

/// Parses seconds, or a number with a unit: 30, 1.5s, 500ms, 2m. Returns INVALID_ARGUMENT for other
/// text.
absl::StatusOr<absl::Duration> ParseDurationText(const std::string& text);

/// Adds an option that takes a duration in ParseDurationText's form. A malformed value is a usage
/// error. `environment` names the environment variable with the default, or is empty if there is
/// none.
void AddDurationOption(CLI::App& command, const std::string& name, absl::Duration& value,
                       const std::string& description, const std::string& environment = "");

/// Returns the names of the outputs that --outputs accepts, in the order of the columns.
const std::vector<std::string>& OutputNames();

/// Returns the output:: bits of the names; "all" stands for every output. Returns INVALID_ARGUMENT
/// with the known names if a name is unknown.
absl::StatusOr<uint32_t> ParseOutputs(const std::vector<std::string>& names);

/// Prints the error to `err`, and as JSON to `out` if --json was given. Returns the exit code.
int ReportError(const CommandStreams& streams, const CommonOptions& options,
                const absl::Status& status);

/// Returns `client_options` with at most so many retries of a request, if the number is given.
Client::Options WithRetries(std::optional<int32_t> retries, Client::Options client_options = {});

/// Creates a client for the common options. It connects at its first call.
absl::StatusOr<std::unique_ptr<Client>> Connect(const CommonOptions& options,
                                                Client::Options client_options = {});

/// Returns the text of the notice that a command prints when its server has not answered for a
/// second. `option` is the one that sets how long the command waits.
std::string WaitingText(const CommonOptions& options, absl::string_view option = "--timeout");

/// Lists the heads and prints a notice when the server does not answer within a second.
absl::StatusOr<ServerInfo> ListHeads(Client& client, const CommonOptions& options,
                                     const CommandStreams& streams);

/// Returns a report of the server's Verify call as JSON.
nlohmann::ordered_json ToJson(const VerifyReport& report);

void AddPingCommand(CLI::App& app, CommandState& state);
void AddInfoCommand(CLI::App& app, CommandState& state);
void AddSelftestCommand(CLI::App& app, CommandState& state);
void AddScoreCommand(CLI::App& app, CommandState& state);
void AddBenchCommand(CLI::App& app, CommandState& state);
void AddWeightsCommand(CLI::App& app, CommandState& state);
void AddExportHeadCommand(CLI::App& app, CommandState& state);
void AddTokenCommand(CLI::App& app, CommandState& state);

/// Runs logprobctl with the arguments after the program's name. Returns the exit code: 0 for
/// success, 1 for a failure, 2 for a command line that cannot be parsed.
int RunCli(const std::vector<std::string>& arguments, const CommandStreams& streams);

}  // namespace logprobd::client
