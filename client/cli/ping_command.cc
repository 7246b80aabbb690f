#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "client/cli/command.h"
#include "client/cli/table.h"
#include "nlohmann/json.hpp"

namespace logprobd::client {
namespace {

struct PingOptions {
  CommonOptions common;
  int count = 5;
  absl::Duration wait = absl::ZeroDuration();
};

int RunPing(const PingOptions& options, const CommandStreams& streams) {
  // Without retries: whoever pings wants to know now.
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(options.common, {.retries = 0});
  if (!client.ok()) return ReportError(streams, options.common, client.status());
  if (options.wait > absl::ZeroDuration()) {
    if (absl::Status status = (*client)->WaitReady(options.wait); !status.ok()) {
      return ReportError(streams, options.common, status);
    }
  }
  // The first call connects; it is not timed.
  const absl::StatusOr<ServerInfo> info = (*client)->ListHeads();
  if (!info.ok()) return ReportError(streams, options.common, info.status());
  bool is_ready = false;
  std::vector<double> seconds;
  for (int call = 0; call < options.count; ++call) {
    const auto start = std::chrono::steady_clock::now();
    const absl::StatusOr<bool> ready = (*client)->Ready();
    if (!ready.ok()) return ReportError(streams, options.common, ready.status());
    is_ready = *ready;
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  if (options.common.json) {
    const nlohmann::ordered_json report = {
        {"address", options.common.address},       {"ready", is_ready},
        {"server_version", info->server_version},  {"heads", info->heads.size()},
        {"round_trip_median_seconds", median},     {"round_trip_min_seconds", seconds.front()},
        {"round_trip_max_seconds", seconds.back()}};
    streams.out << report.dump() << '\n';
  } else {
    streams.out << absl::StrCat(
        options.common.address, " is ", is_ready ? "ready" : "NOT ready", ": logprobd ",
        info->server_version, ", ", info->heads.size(),
        info->heads.size() == 1 ? " head" : " heads", ", round trip ", MillisecondsText(median),
        " ms (", MillisecondsText(seconds.front()), " to ", MillisecondsText(seconds.back()), ", ",
        seconds.size(), " calls)\n");
  }
  return is_ready ? kExitOk : kExitFailure;
}

}  // namespace

void AddPingCommand(CLI::App& app, CommandState& state) {
  auto options = std::make_shared<PingOptions>();
  CLI::App* command =
      app.add_subcommand("ping", "Is the server there and ready, and how far away is it?");
  AddCommonOptions(*command, options->common);
  command->add_option("--count", options->count, "Calls to time")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  AddDurationOption(*command, "--wait", options->wait, "Wait this long for the server to be ready");
  command->footer(
      "Prints address, readiness, version and round-trip time. Exit code 1 when the server cannot "
      "be reached or is not ready.\n\n"
      "Examples:\n"
      "  logprobctl ping\n"
      "  logprobctl ping --address gpu-7:8470 --wait 60s    until a model is loaded\n"
      "  logprobctl ping --json --count 100");
  command->callback([options, &state] { state.exit_code = RunPing(*options, state.streams); });
}

}  // namespace logprobd::client
