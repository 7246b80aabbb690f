#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/command.h"
#include "client/cli/table.h"
#include "nlohmann/json.hpp"

namespace logprobd::client {
namespace {

// Below this the probe's distributions are close to uniform and most errors would not show.
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
  const VerifyReport& report = head.report;
  return {{"head", head.head},
          {"passed", report.passed},
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

int RunSelftest(const SelftestOptions& options, const CommandStreams& streams) {
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(options.common);
  if (!client.ok()) return ReportError(streams, options.common, client.status());
  std::vector<std::string> heads = {options.verify.head};
  if (options.verify.head.empty()) {
    const absl::StatusOr<ServerInfo> info = (*client)->ListHeads();
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
                  << " hardly vary, so this test proves little: is the weight what you meant to "
                     "load?\n";
    }
  }
  if (!has_passed) {
    streams.err << "logprobctl: the engine's numbers differ from double precision by more than "
                   "the tolerance: do not use this server, and keep its log\n";
  }
  return has_passed ? kExitOk : kExitFailure;
}

}  // namespace

void AddSelftestCommand(CLI::App& app, CommandState& state) {
  auto options = std::make_shared<SelftestOptions>();
  CLI::App* command = app.add_subcommand("selftest", "Are the server's numbers right?");
  AddCommonOptions(*command, options->common);
  command->add_option("--head", options->verify.head, "Head to test; all of them by default");
  command->add_option("--rows", options->verify.rows, "Rows of the probe, 1 to 64; 0: 8")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  command->add_option("--seed", options->verify.seed, "Seed of the probe; 0: 1")
      ->capture_default_str();
  command->footer(
      "The server scores a seeded probe with its engine, and again in double precision from the "
      "weights on disk, and reports the largest differences. Exit code 1 on FAIL.\n\n"
      "Examples:\n"
      "  logprobctl selftest\n"
      "  logprobctl selftest --rows 64 --seed 7 --timeout 5m");
  command->callback([options, &state] { state.exit_code = RunSelftest(*options, state.streams); });
}

}  // namespace logprobd::client
