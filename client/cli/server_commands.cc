// The commands that ask a server about itself: ping, info and selftest.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/command.h"
#include "client/cli/terminal.h"
#include "nlohmann/json.hpp"

namespace logprobd::client {
namespace {

struct PingOptions {
  CommonOptions common;
  int count = 5;
  absl::Duration wait = absl::ZeroDuration();
};

absl::Status AwaitReady(Client& client, const PingOptions& options, const CommandStreams& streams) {
  CommonOptions waiting = options.common;
  waiting.timeout = options.wait;
  const DelayedNotice notice(streams.err, WaitingText(waiting, "--wait"));
  return client.WaitReady(options.wait);
}

int RunPing(const PingOptions& options, const CommandStreams& streams) {
  // Ping does not retry, because it reports the current state of the server.
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(options.common, WithRetries(0));
  if (!client.ok()) return ReportError(streams, options.common, client.status());
  if (options.wait > absl::ZeroDuration()) {
    const absl::Status status = AwaitReady(**client, options, streams);
    if (!status.ok()) return ReportError(streams, options.common, status);
  }
  // This call opens the connection, so it is not timed.
  const absl::StatusOr<ServerInfo> info = ListHeads(**client, options.common, streams);
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

nlohmann::ordered_json ToJson(const std::vector<Shard>& layout) {
  nlohmann::ordered_json shards = nlohmann::ordered_json::array();
  for (const Shard& shard : layout) {
    shards.push_back({{"replica", shard.replica},
                      {"shard", shard.shard},
                      {"device", shard.device},
                      {"vocab_begin", shard.vocab_begin},
                      {"vocab_end", shard.vocab_end}});
  }
  return shards;
}

nlohmann::ordered_json ToJson(const Head& head) {
  return {{"name", head.name},
          {"model_type", head.model_type},
          {"vocab_size", head.vocab_size},
          {"vocab_rows", head.vocab_rows},
          {"hidden_size", head.hidden_size},
          {"dtype", std::string(DtypeName(head.dtype))},
          {"weights_version", head.weights_version},
          {"ready", head.ready},
          {"tied", head.tied},
          {"scale", head.scale},
          {"softcap", head.softcap},
          {"has_bias", head.has_bias},
          {"tensor", head.tensor},
          {"engine", head.engine},
          {"weight_bytes", head.weight_bytes},
          {"transports", head.transports},
          {"layout", ToJson(head.layout)},
          {"warnings", head.warnings},
          {"limits",
           {{"message_bytes_max", head.limits.message_bytes_max},
            {"request_rows_max", head.limits.request_rows_max},
            {"top_k_max", head.limits.top_k_max},
            {"candidates_max", head.limits.candidates_max},
            {"segments_max", head.limits.segments_max},
            {"stream_window", head.limits.stream_window}}}};
}

/// The transforms that the head applies to its logits, for example "scale 0.0625, softcap 30".
std::string TransformText(const Head& head) {
  std::vector<std::string> parts;
  if (head.scale != 1.0F) parts.push_back(absl::StrCat("scale ", head.scale));
  if (head.has_bias) parts.emplace_back("bias");
  if (head.softcap != 0.0F) parts.push_back(absl::StrCat("softcap ", head.softcap));
  return parts.empty() ? "none" : absl::StrJoin(parts, ", ");
}

void PrintTables(const ServerInfo& info, std::ostream& out) {
  Table heads({"head", "model", "vocab", "hidden", "dtype", "weights", "version", "transforms",
               "tensor", "engine", "ready"});
  Table limits({"limits of head", "message", "rows", "top_k", "candidates", "segments", "window",
                "transports"});
  Table layout({"layout of head", "replica", "shard", "device", "ids"});
  bool has_layout = false;
  for (const Head& head : info.heads) {
    const std::string padding =
        head.vocab_rows > head.vocab_size
            ? absl::StrCat(" (+", head.vocab_rows - head.vocab_size, " padding)")
            : "";
    heads.AddRow({head.name, head.model_type, absl::StrCat(CountText(head.vocab_size), padding),
                  CountText(head.hidden_size), std::string(DtypeName(head.dtype)),
                  BytesText(head.weight_bytes), absl::StrCat(head.weights_version),
                  TransformText(head), absl::StrCat(head.tensor, head.tied ? " (tied)" : ""),
                  head.engine, head.ready ? "yes" : "NO"});
    limits.AddRow({head.name, BytesText(head.limits.message_bytes_max),
                   CountText(head.limits.request_rows_max), CountText(head.limits.top_k_max),
                   CountText(head.limits.candidates_max), CountText(head.limits.segments_max),
                   CountText(head.limits.stream_window), absl::StrJoin(head.transports, ",")});
    for (const Shard& shard : head.layout) {
      layout.AddRow({head.name, absl::StrCat(shard.replica), absl::StrCat(shard.shard),
                     shard.device,
                     absl::StrCat("[", shard.vocab_begin, ", ", shard.vocab_end, ")")});
      has_layout = true;
    }
  }
  out << "logprobd " << info.server_version << "\n\n";
  if (info.heads.empty()) {
    out << "no head is loaded\n";
    return;
  }
  heads.Print(out);
  out << '\n';
  limits.Print(out);
  if (has_layout) {
    out << '\n';
    layout.Print(out);
  }
  for (const Head& head : info.heads) {
    for (const std::string& warning : head.warnings) {
      out << "\nwarning: head " << head.name << ": " << warning << '\n';
    }
  }
}

int RunInfo(const CommonOptions& options, const CommandStreams& streams) {
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(options);
  if (!client.ok()) return ReportError(streams, options, client.status());
  const absl::StatusOr<ServerInfo> info = ListHeads(**client, options, streams);
  if (!info.ok()) return ReportError(streams, options, info.status());
  if (options.json) {
    nlohmann::ordered_json report = {{"server_version", info->server_version},
                                     {"heads", nlohmann::ordered_json::array()}};
    for (const Head& head : info->heads) report["heads"].push_back(ToJson(head));
    streams.out << report.dump(2) << '\n';
  } else {
    PrintTables(*info, streams.out);
  }
  return kExitOk;
}

// Below this standard deviation the distributions of the probe are nearly uniform, and most errors
// would not show.
constexpr double kLogitStddevMin = 0.1;

struct SelftestOptions {
  CommonOptions common;
  VerifyArgs verify;
};

struct HeadReport {
  std::string head;
  VerifyReport report;
};

void PrintText(const std::vector<HeadReport>& reports, std::ostream& out) {
  Table table({"head", "rows", "max |d logprob|", "tolerance", "max |d entropy|", "tolerance",
               "logits stddev", "engine", "seconds", "result"});
  for (const auto& [head, report] : reports) {
    table.AddRow({head, absl::StrCat(report.rows),
                  absl::StrFormat("%.2e", report.logprob_difference_max),
                  absl::StrFormat("%.0e", report.logprob_tolerance),
                  absl::StrFormat("%.2e", report.entropy_difference_max),
                  absl::StrFormat("%.0e", report.entropy_tolerance),
                  absl::StrFormat("%.2f", report.logit_stddev), report.engine,
                  absl::StrFormat("%.2f", report.seconds), report.passed ? "PASS" : "FAIL"});
  }
  table.Print(out);
}

nlohmann::ordered_json ToJson(const HeadReport& head) {
  nlohmann::ordered_json json = {{"head", head.head}};
  json.update(ToJson(head.report));
  return json;
}

int RunSelftest(const SelftestOptions& options, const CommandStreams& streams) {
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(options.common);
  if (!client.ok()) return ReportError(streams, options.common, client.status());
  std::vector<std::string> heads = {options.verify.head};
  if (options.verify.head.empty()) {
    const absl::StatusOr<ServerInfo> info = ListHeads(**client, options.common, streams);
    if (!info.ok()) return ReportError(streams, options.common, info.status());
    heads.clear();
    for (const Head& head : info->heads) heads.push_back(head.name);
    if (heads.empty()) {
      return ReportError(streams, options.common,
                         absl::UnavailableError("the server has no head to test"));
    }
  }
  std::vector<HeadReport> reports;
  bool has_passed = true;
  for (const std::string& head : heads) {
    VerifyArgs args = options.verify;
    args.head = head;
    absl::StatusOr<VerifyReport> report = (*client)->Verify(args);
    if (!report.ok()) return ReportError(streams, options.common, report.status());
    has_passed = has_passed && report->passed;
    reports.push_back({.head = head, .report = *std::move(report)});
  }
  if (options.common.json) {
    nlohmann::ordered_json json = {{"passed", has_passed},
                                   {"heads", nlohmann::ordered_json::array()}};
    for (const HeadReport& report : reports) json["heads"].push_back(ToJson(report));
    streams.out << json.dump(2) << '\n';
  } else {
    PrintText(reports, streams.out);
    streams.out << (has_passed ? "PASS\n" : "FAIL\n");
  }
  for (const auto& [head, report] : reports) {
    if (report.logit_stddev < kLogitStddevMin) {
      streams.err << "logprobctl: the logits of " << head
                  << " hardly vary, so this test proves little: check that the server loaded the "
                     "intended weight\n";
    }
  }
  if (!has_passed) {
    streams.err << "logprobctl: the engine's numbers differ from double precision by more than "
                   "the tolerance: do not use this server, and keep its log\n";
  }
  return has_passed ? kExitOk : kExitFailure;
}

}  // namespace

void AddPingCommand(CLI::App& app, CommandState& state) {
  auto options = std::make_shared<PingOptions>();
  CLI::App* command =
      app.add_subcommand("ping", "Check that the server is ready and time a round trip");
  AddCommonOptions(*command, options->common);
  command->add_option("--count", options->count, "Number of round trips to time")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  AddDurationOption(*command, "--wait", options->wait,
                    "Time to wait for the server to become ready; by default ping does not wait");
  command->footer(
      "Prints the address, readiness, version and round-trip time of the server. The exit code is "
      "1 "
      "if the server cannot be reached or is not ready.\n\n"
      "Examples:\n"
      "  logprobctl ping\n"
      "  logprobctl ping --address gpu-7:8470 --wait 60s    wait until a model is loaded\n"
      "  logprobctl ping --json --count 100");
  command->callback([options, &state] { state.exit_code = RunPing(*options, state.streams); });
}

void AddInfoCommand(CLI::App& app, CommandState& state) {
  auto options = std::make_shared<CommonOptions>();
  CLI::App* command = app.add_subcommand("info", "Show the heads of a server and its limits");
  AddCommonOptions(*command, *options);
  command->footer(
      "Targets must lie in [0, vocab). Each hidden state has `hidden` elements. The client splits "
      "calls that exceed the limits of a request.\n\n"
      "Examples:\n"
      "  logprobctl info\n"
      "  logprobctl info --json | jq '.heads[0].vocab_size'");
  command->callback([options, &state] { state.exit_code = RunInfo(*options, state.streams); });
}

void AddSelftestCommand(CLI::App& app, CommandState& state) {
  auto options = std::make_shared<SelftestOptions>();
  CLI::App* command =
      app.add_subcommand("selftest", "Compare the server's numbers with double precision");
  AddCommonOptions(*command, options->common);
  command->add_option("--head", options->verify.head,
                      "Head to test; by default every head is tested");
  command->add_option("--rows", options->verify.rows, "Number of probe rows, 1 to 64; 0 means 8")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  command->add_option("--seed", options->verify.seed, "Seed of the probe; 0 means 1")
      ->capture_default_str();
  command->footer(
      "The server scores a seeded probe with its engine and again in double precision from the "
      "weights on disk, and reports the largest differences. The exit code is 1 on FAIL.\n\n"
      "Examples:\n"
      "  logprobctl selftest\n"
      "  logprobctl selftest --rows 64 --seed 7 --timeout 5m");
  command->callback([options, &state] { state.exit_code = RunSelftest(*options, state.streams); });
}

}  // namespace logprobd::client
