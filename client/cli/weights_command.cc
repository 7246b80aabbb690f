#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cli/command.h"
#include "client/cli/terminal.h"
#include "client/cpp/weights_client.h"
#include "nlohmann/json.hpp"

namespace logprobd::client {
namespace {

struct WeightsOptions {
  CommonOptions common;  ///< `address` names the admin listener; `timeout` does not apply to loads.
  absl::Duration load_timeout = absl::Hours(1);
  LoadWeightsArgs load;   ///< `head` applies to all commands, the other fields to load.
  uint64_t version = 0;   ///< Version to commit; 0 means any staged version.
  bool staged = false;    ///< Discard the staged version.
  bool previous = false;  ///< Discard the previous version.
};

std::string DtypeText(Dtype dtype) { return std::string(DtypeName(dtype)); }

nlohmann::ordered_json ToJson(const WeightsVersion& version) {
  return {{"version", version.version},
          {"sha256", version.sha256},
          {"source", version.source},
          {"loaded_unix_seconds", version.loaded_unix_seconds},
          {"weight_bytes", version.weight_bytes},
          {"dtype", DtypeText(version.dtype)}};
}

nlohmann::ordered_json ToJson(const std::optional<WeightsVersion>& version) {
  return version.has_value() ? ToJson(*version) : nlohmann::ordered_json();
}

nlohmann::ordered_json ToJson(const std::optional<PushedVersion>& pushed) {
  if (!pushed.has_value()) return {};
  return {{"version", pushed->version}, {"rows", pushed->rows}, {"vocab_rows", pushed->vocab_rows}};
}

nlohmann::ordered_json ToJson(const HeadWeights& head) {
  return {{"head", head.head},
          {"live", ToJson(head.live)},
          {"staged", ToJson(head.staged)},
          {"previous", ToJson(head.previous)},
          {"pushed", ToJson(head.pushed)},
          {"highest_version", head.highest_version}};
}

void PrintTable(const std::vector<HeadWeights>& heads, std::ostream& out) {
  Table table({"head", "state", "version", "dtype", "weights", "loaded (UTC)", "sha256", "source"});
  for (const HeadWeights& head : heads) {
    const auto add = [&](const char* state, const std::optional<WeightsVersion>& version) {
      if (!version.has_value()) return;
      table.AddRow({head.head, state, absl::StrCat(version->version), DtypeText(version->dtype),
                    BytesText(version->weight_bytes),
                    absl::FormatTime("%Y-%m-%d %H:%M:%S",
                                     absl::FromUnixSeconds(version->loaded_unix_seconds),
                                     absl::UTCTimeZone()),
                    version->sha256.empty() ? "unknown" : version->sha256, version->source});
    };
    if (!head.live.has_value()) table.AddRow({head.head, "NONE LIVE", "", "", "", "", "", ""});
    add("live", head.live);
    add("staged", head.staged);
    add("previous", head.previous);
    if (head.pushed.has_value()) {
      table.AddRow({head.head, "pushed", absl::StrCat(head.pushed->version), "", "", "", "",
                    absl::StrCat(head.pushed->rows, " of ", head.pushed->vocab_rows, " rows")});
    }
  }
  table.Print(out);
}

/// Describes the progress of a load on one line.
std::string ProgressText(const LoadProgress& progress) {
  if (progress.bytes_total == 0) return absl::StrCat(progress.phase, " ...");
  return absl::StrCat(progress.phase, " ", progress.bytes_done * 100 / progress.bytes_total, "% (",
                      BytesText(progress.bytes_done), " of ", BytesText(progress.bytes_total), ")");
}

/// Makes a path absolute, as the server requires. A relative path starts at the current directory.
std::string AbsolutePath(const std::string& path) {
  std::error_code error;
  const std::filesystem::path given(path);
  if (path.empty() || given.is_absolute()) return path;
  const std::filesystem::path absolute = std::filesystem::absolute(given, error);
  return error ? path : absolute.lexically_normal().string();
}

/// Returns `call()` and prints a notice when the server does not answer within a second.
template <typename Call>
auto Announced(const WeightsOptions& options, const CommandStreams& streams, const Call& call) {
  const DelayedNotice notice(streams.err, WaitingText(options.common));
  return call();
}

int RunLoad(const WeightsOptions& options, const CommandStreams& streams, WeightsClient& client) {
  LoadWeightsArgs args = options.load;
  args.path = AbsolutePath(args.path);
  ProgressLine line(streams.err, streams.is_terminal);
  CommonOptions waiting = options.common;
  waiting.timeout = options.load_timeout;
  std::optional<DelayedNotice> notice(std::in_place, streams.err, WaitingText(waiting));
  const absl::StatusOr<WeightsVersion> version =
      client.Load(args, [&](const LoadProgress& progress) {
        notice.reset();
        line.Update(ProgressText(progress));
        return true;
      });
  notice.reset();
  line.Clear();
  if (!version.ok()) return ReportError(streams, options.common, version.status());
  const bool is_live = args.commit || args.in_place;
  if (options.common.json) {
    nlohmann::ordered_json report = ToJson(*version);
    report["state"] = is_live ? "live" : "staged";
    streams.out << report.dump(2) << '\n';
    return kExitOk;
  }
  streams.out << "version " << version->version << (is_live ? " is live" : " is staged") << ": "
              << DtypeName(version->dtype) << ", " << BytesText(version->weight_bytes) << " from "
              << version->source << "\nsha256 " << version->sha256 << '\n';
  if (!is_live) streams.out << "make it live with: logprobctl weights commit\n";
  return kExitOk;
}

int RunList(const WeightsOptions& options, const CommandStreams& streams, WeightsClient& client) {
  const absl::StatusOr<std::vector<HeadWeights>> heads =
      Announced(options, streams, [&] { return client.List(options.load.head); });
  if (!heads.ok()) return ReportError(streams, options.common, heads.status());
  if (options.common.json) {
    nlohmann::ordered_json report = {{"heads", nlohmann::ordered_json::array()}};
    for (const HeadWeights& head : *heads) report["heads"].push_back(ToJson(head));
    streams.out << report.dump(2) << '\n';
  } else {
    PrintTable(*heads, streams.out);
  }
  return kExitOk;
}

/// Prints the versions of a head after a change.
int Report(const WeightsOptions& options, const CommandStreams& streams,
           const absl::StatusOr<HeadWeights>& head) {
  if (!head.ok()) return ReportError(streams, options.common, head.status());
  if (options.common.json) {
    streams.out << ToJson(*head).dump(2) << '\n';
  } else {
    PrintTable({*head}, streams.out);
  }
  return kExitOk;
}

using WeightsBody =
    std::function<int(const WeightsOptions&, const CommandStreams&, WeightsClient&)>;

/// Adds a subcommand with the options that all of them take. It runs `body` with a client.
CLI::App& AddSubcommand(CLI::App& weights, CommandState& state, const std::string& name,
                        const std::string& description,
                        const std::shared_ptr<WeightsOptions>& options, WeightsBody body) {
  CLI::App* command = weights.add_subcommand(name, description);
  command
      ->add_option(
          "--admin,--address", options->common.address,
          "Admin listener of the server: auto, unix:PATH or host:port, as logprobd --admin has it")
      ->envname("LOGPROBD_ADMIN")
      ->capture_default_str()
      ->group("Connection");
  const bool is_load = name == "load";
  AddDurationOption(*command, "--timeout",
                    is_load ? options->load_timeout : options->common.timeout,
                    "Time limit of the call", is_load ? "" : "LOGPROBD_TIMEOUT_S");
  command->get_option("--timeout")->group("Connection");
  AddSecurityOptions(*command, options->common);
  command->add_flag("--json", options->common.json, "Print the result as JSON instead of text");
  command->add_option("--head", options->load.head,
                      "Name of the head; optional if the server has only one head");
  command->callback([options, &state, body = std::move(body)] {
    absl::StatusOr<std::unique_ptr<WeightsClient>> client =
        WeightsClient::Create({.address = options->common.address,
                               .timeout = options->common.timeout,
                               .load_timeout = options->load_timeout,
                               .tls = options->common.tls,
                               .token = options->common.token});
    state.exit_code = client.ok() ? body(*options, state.streams, **client)
                                  : ReportError(state.streams, options->common, client.status());
  });
  return *command;
}

std::shared_ptr<WeightsOptions> MakeOptions() {
  auto options = std::make_shared<WeightsOptions>();
  options->common.address = WeightsClient::Options().address;
  return options;
}

void AddLoad(CLI::App& weights, CommandState& state) {
  const std::shared_ptr<WeightsOptions> options = MakeOptions();
  CLI::App& command = AddSubcommand(
      weights, state, "load", "Load and check a version next to the live one", options, RunLoad);
  LoadWeightsArgs& load = options->load;
  command.add_option("path", load.path, "Model folder or .safetensors file on the server's host")
      ->type_name("DIR")
      ->required();
  command
      .add_option(
          "--version", load.version,
          "Number of the new version, above all that have been live; 0 takes the next unused "
          "number")
      ->capture_default_str();
  command
      .add_option("--sha256", load.sha256,
                  "Digest that the weights must have, in the form that list shows")
      ->type_name("HEX");
  command.add_flag("--commit", load.commit, "Make the version live as soon as it is loaded");
  command.add_flag(
      "--in-place", load.in_place,
      "Replace the live weights while requests wait, for heads of which two copies do not fit "
      "in memory");
  command.add_flag("--allow-nonfinite", load.allow_nonfinite,
                   "Accept weights that contain NaN or Inf");
  command.footer(
      "The folder must lie below one of the server's --weights-root folders. It must hold a "
      "complete and finite head of the same shape and dtype as the live one. A load that fails or "
      "is stopped "
      "with Ctrl-C leaves the live version unchanged. After --in-place no rollback is possible; if "
      "the new weights cannot be read, the server reads the old ones again.\n\n"
      "Examples:\n"
      "  logprobctl weights load /models/step-200\n"
      "  logprobctl weights load /models/step-200 --version 200 --commit\n"
      "  logprobctl weights load /models/step-200 --sha256 \"$(cat step-200.sha256)\" --commit");
}

void AddList(CLI::App& weights, CommandState& state) {
  AddSubcommand(weights, state, "list", "List the versions of the weights of each head",
                MakeOptions(), RunList)
      .footer(
          "The first list after the server's start may take as long as reading the weights, since "
          "the server computes their sha256.\n\n"
          "Examples:\n"
          "  logprobctl weights list\n"
          "  logprobctl weights list --json | jq '.heads[0].live.version'");
}

void AddCommit(CLI::App& weights, CommandState& state) {
  const std::shared_ptr<WeightsOptions> options = MakeOptions();
  CLI::App& command = AddSubcommand(
      weights, state, "commit", "Make the staged version live", options,
      [](const WeightsOptions& given, const CommandStreams& streams, WeightsClient& client) {
        return Report(given, streams, Announced(given, streams, [&] {
                        return client.Commit(given.load.head, given.version);
                      }));
      });
  command
      .add_option("--version", options->version,
                  "Number of the version that must be staged; 0 accepts any version")
      ->capture_default_str();
  command.footer(
      "Requests that have started finish on the previous version, which is kept for rollback.\n\n"
      "Examples:\n"
      "  logprobctl weights commit\n"
      "  logprobctl weights commit --version 200");
}

void AddRollback(CLI::App& weights, CommandState& state) {
  AddSubcommand(
      weights, state, "rollback", "Make the previous version live again", MakeOptions(),
      [](const WeightsOptions& given, const CommandStreams& streams, WeightsClient& client) {
        return Report(given, streams,
                      Announced(given, streams, [&] { return client.Rollback(given.load.head); }));
      })
      .footer(
          "The two versions change places: a second rollback undoes the first.\n\n"
          "Examples:\n"
          "  logprobctl weights rollback");
}

void AddDiscard(CLI::App& weights, CommandState& state) {
  const std::shared_ptr<WeightsOptions> options = MakeOptions();
  CLI::App& command = AddSubcommand(
      weights, state, "discard", "Drop a version that is not live and free its memory", options,
      [](const WeightsOptions& given, const CommandStreams& streams, WeightsClient& client) {
        return Report(given, streams, Announced(given, streams, [&] {
                        return client.Discard(given.load.head, given.staged, given.previous);
                      }));
      });
  CLI::Option_group* which = command.add_option_group("Which");
  which->add_flag("--staged", options->staged, "Drop the staged version and pushed rows");
  which->add_flag("--previous", options->previous, "Drop the version that is kept for rollback");
  which->require_option(1, 2);
  command.footer(
      "Examples:\n"
      "  logprobctl weights discard --staged\n"
      "  logprobctl weights discard --previous");
}

}  // namespace

void AddWeightsCommand(CLI::App& app, CommandState& state) {
  CLI::App* weights = app.add_subcommand(
      "weights", "Load, commit and roll back versions of the weights of a running server");
  weights->require_subcommand(1);
  weights->footer(
      "The commands use the server's admin listener: start logprobd with --admin auto. A "
      "head has one live version and at most one staged and one previous version, which is kept "
      "for "
      "rollback. A load drops the previous version, so that memory never holds three versions.\n\n"
      "Examples:\n"
      "  logprobctl weights load /models/step-200    read and check a version\n"
      "  logprobctl weights commit                   make it live between two batches\n"
      "  logprobctl weights rollback                 make the previous version live again\n"
      "  logprobctl weights list");
  AddLoad(*weights, state);
  AddCommit(*weights, state);
  AddRollback(*weights, state);
  AddDiscard(*weights, state);
  AddList(*weights, state);
}

}  // namespace logprobd::client
