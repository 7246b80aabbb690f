#include "client/cli/command.h"

#include <cmath>
#include <iostream>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace logprobd::client {

absl::StatusOr<absl::Duration> ParseDurationText(const std::string& text) {
  double seconds = 0;
  absl::Duration duration;
  if (absl::SimpleAtod(text, &seconds) && std::isfinite(seconds)) {
    duration = absl::Seconds(seconds);
  } else if (!absl::ParseDuration(text, &duration) || duration == absl::InfiniteDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" is not a duration: write seconds, or 500ms, 30s, 2m"));
  }
  if (duration <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" must be above 0"));
  }
  return duration;
}

void AddDurationOption(CLI::App& command, const std::string& name, absl::Duration& value,
                       const std::string& description, const std::string& environment) {
  command
      .add_option_function<std::string>(
          name,
          [&value, name](const std::string& text) {
            const absl::StatusOr<absl::Duration> parsed = ParseDurationText(text);
            if (!parsed.ok()) {
              throw CLI::ValidationError(name, std::string(parsed.status().message()));
            }
            value = *parsed;
          },
          description)
      ->type_name("DURATION")
      ->default_str(absl::FormatDuration(value))
      ->envname(environment);
}

void AddCommonOptions(CLI::App& command, CommonOptions& options) {
  command
      .add_option("--address", options.address,
                  "Server: host:port, unix:///path or dns:///name:port; several, with commas")
      ->envname("LOGPROBD_ADDRESS")
      ->capture_default_str()
      ->group("Connection");
  AddDurationOption(command, "--timeout", options.timeout, "Limit of a call, retries included",
                    "LOGPROBD_TIMEOUT_S");
  command.get_option("--timeout")->group("Connection");
  command.add_flag("--json", options.json, "Print JSON instead of text");
}

int ReportError(const CommandStreams& streams, const CommonOptions& options,
                const absl::Status& status) {
  if (options.json) {
    const nlohmann::ordered_json error = {{"error",
                                           {{"code", absl::StatusCodeToString(status.code())},
                                            {"message", std::string(status.message())}}}};
    streams.out << error.dump() << '\n';
  }
  streams.err << "logprobctl: " << absl::StatusCodeToString(status.code()) << ": "
              << status.message() << '\n';
  return kExitFailure;
}

absl::StatusOr<std::unique_ptr<Client>> Connect(const CommonOptions& options,
                                                Client::Options client_options) {
  client_options.address = options.address;
  client_options.timeout = options.timeout;
  client_options.on_wait = [](const std::string& message) {
    std::cerr << "logprobctl: " << message << std::endl;
  };
  return Client::Create(client_options);
}

int RunCli(const std::vector<std::string>& arguments, const CommandStreams& streams) {
  CommandState state{.streams = streams, .arguments = arguments};
  CLI::App app(
      "Client of logprobd: log-probabilities and entropies of tokens against a model's LM head.",
      "logprobctl");
  app.require_subcommand(1);
  app.set_version_flag("--version", "logprobctl " LOGPROBD_VERSION);
  app.failure_message(CLI::FailureMessage::simple);
  app.footer(
      "Start with:\n"
      "  logprobctl ping                 is the server there, and ready?\n"
      "  logprobctl selftest             are its numbers right?\n"
      "  logprobctl COMMAND --help       options and examples\n"
      "Exit codes: 0 ok, 1 failure, 2 usage.");
  AddPingCommand(app, state);
  AddInfoCommand(app, state);
  AddScoreCommand(app, state);
  AddSelftestCommand(app, state);
  AddBenchCommand(app, state);
  AddWeightsCommand(app, state);

  // Underscores in the names of flags are as good as dashes. CLI11 wants the arguments reversed.
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  for (std::string& text : reversed) {
    if (text.rfind("--", 0) != 0) continue;
    for (size_t at = 0; at < text.size() && text[at] != '='; ++at) {
      if (text[at] == '_') text[at] = '-';
    }
  }
  try {
    app.parse(std::move(reversed));
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error, streams.out, streams.err);
    return code == 0 ? kExitOk : kExitUsage;
  }
  return state.exit_code;
}

}  // namespace logprobd::client
