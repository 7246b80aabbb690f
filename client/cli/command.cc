#include "client/cli/command.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "client/cli/terminal.h"
#include "nlohmann/json.hpp"

namespace logprobd::client {

absl::StatusOr<absl::Duration> ParseDurationText(const std::string& text) {
  double seconds = 0;
  absl::Duration duration;
  if (absl::SimpleAtod(text, &seconds) && std::isfinite(seconds)) {
    duration = absl::Seconds(seconds);
  } else if (!absl::ParseDuration(text, &duration) || duration == absl::InfiniteDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", text,
        "\" is not a duration: write seconds, or a number with a unit such as 500ms, 30s or 2m"));
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
      .add_option(
          "--address", options.address,
          "Address of the server: host:port, unix:///path or dns:///name:port; separate several "
          "servers with commas")
      ->envname("LOGPROBD_ADDRESS")
      ->capture_default_str()
      ->group("Connection");
  AddDurationOption(command, "--timeout", options.timeout,
                    "Time limit of a call, including retries", "LOGPROBD_TIMEOUT_S");
  command.get_option("--timeout")->group("Connection");
  AddSecurityOptions(command, options);
  command.add_flag("--json", options.json, "Print the result as JSON instead of text");
}

void AddSecurityOptions(CLI::App& command, CommonOptions& options) {
  if (const char* const token = std::getenv("LOGPROBD_TOKEN"); token != nullptr) {
    options.token = token;
  }
  command
      .add_option_function<std::string>(
          "--token-file",
          [&options](const std::string& path) {
            std::ifstream file(path);
            if (!(file >> options.token)) {
              throw CLI::ValidationError("--token-file", path + " has no token");
            }
          },
          "File with the caller's token, for servers that run with --tokens. Default: the token in "
          "LOGPROBD_TOKEN, if it is set")
      ->type_name("FILE")
      ->group("Connection");
  std::optional<Tls>& tls = options.tls;
  const auto add = [&command, &tls](const std::string& name, std::string Tls::*member,
                                    const std::string& description) {
    command
        .add_option_function<std::string>(
            name,
            [&tls, member](const std::string& value) {
              if (!tls.has_value()) tls.emplace();
              (*tls).*member = value;
            },
            description)
        ->envname("LOGPROBD_" +
                  absl::AsciiStrToUpper(absl::StrReplaceAll(name.substr(2), {{"-", "_"}})))
        ->group("Connection");
  };
  command
      .add_flag_callback(
          "--tls", [&tls] { tls = tls.value_or(Tls()); },
          "Connect with TLS and trust the system's roots; the other --tls options imply it")
      ->group("Connection");
  add("--tls-ca", &Tls::ca, "PEM file with the CAs that may have issued the server's certificate");
  add("--tls-cert", &Tls::cert,
      "PEM file with this client's certificate, for servers that demand one");
  add("--tls-key", &Tls::key, "PEM file with the private key of --tls-cert");
  add("--tls-server-name", &Tls::server_name,
      "Name that the server's certificate must contain; by default the host of --address");
}

const std::vector<std::string>& OutputNames() {
  static const std::vector<std::string> names(std::begin(kOutputNames), std::end(kOutputNames));
  return names;
}

absl::StatusOr<uint32_t> ParseOutputs(const std::vector<std::string>& names) {
  const std::vector<std::string>& known = OutputNames();
  uint32_t bits = 0;
  for (const std::string& name : names) {
    if (name == "all") {
      bits |= (1U << known.size()) - 1;
      continue;
    }
    const auto found = std::find(known.begin(), known.end(), name);
    if (found == known.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "output \"", name, "\" is not known: choose from ", absl::StrJoin(known, ", "), ", all"));
    }
    bits |= 1U << static_cast<size_t>(found - known.begin());
  }
  return bits;
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

Client::Options WithRetries(std::optional<int32_t> retries, Client::Options client_options) {
  if (retries.has_value()) {
    client_options.attempts_max = client_options.overloaded_attempts_max = *retries + 1;
  }
  return client_options;
}

absl::StatusOr<std::unique_ptr<Client>> Connect(const CommonOptions& options,
                                                Client::Options client_options) {
  client_options.address = options.address;
  client_options.timeout = options.timeout;
  client_options.tls = options.tls;
  client_options.token = options.token;
  client_options.on_wait = [](const std::string& message) {
    std::cerr << "logprobctl: " << message << std::endl;
  };
  return Client::Create(client_options);
}

std::string WaitingText(const CommonOptions& options, absl::string_view option) {
  return absl::StrCat("logprobctl: waiting for the server at ", options.address, ", for up to ",
                      absl::FormatDuration(options.timeout), " (", option, ")");
}

absl::StatusOr<ServerInfo> ListHeads(Client& client, const CommonOptions& options,
                                     const CommandStreams& streams) {
  const DelayedNotice notice(streams.err, WaitingText(options));
  return client.ListHeads();
}

nlohmann::ordered_json ToJson(const VerifyReport& report) {
  return {{"passed", report.passed},
          {"rows", report.rows},
          {"logprob_difference_max", report.logprob_difference_max},
          {"logprob_tolerance", report.logprob_tolerance},
          {"entropy_difference_max", report.entropy_difference_max},
          {"entropy_tolerance", report.entropy_tolerance},
          {"logit_stddev", report.logit_stddev},
          {"weights_version", report.weights_version},
          {"engine", report.engine},
          {"seconds", report.seconds}};
}

int RunCli(const std::vector<std::string>& arguments, const CommandStreams& streams) {
  CommandState state{.streams = streams, .arguments = arguments};
  CLI::App app(
      "Command line client of logprobd, which computes log-probabilities and entropies of tokens "
      "from hidden states and a model's LM head.",
      "logprobctl");
  app.require_subcommand(1);
  app.set_version_flag("--version", "logprobctl " LOGPROBD_VERSION);
  app.failure_message(CLI::FailureMessage::simple);
  app.footer(
      "Start with:\n"
      "  logprobctl ping                 check that the server runs and is ready\n"
      "  logprobctl selftest             check that its scores are correct\n"
      "  logprobctl COMMAND --help       show the options of a command, with examples\n"
      "Exit codes: 0 success, 1 failure, 2 malformed command line.");
  AddPingCommand(app, state);
  AddInfoCommand(app, state);
  AddScoreCommand(app, state);
  AddSelftestCommand(app, state);
  AddBenchCommand(app, state);
  AddWeightsCommand(app, state);
  AddExportHeadCommand(app, state);
  AddTokenCommand(app, state);

  // Flags may be written with underscores instead of dashes. CLI11 takes the arguments in reverse
  // order.
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
