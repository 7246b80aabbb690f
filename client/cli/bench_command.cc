#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/bench_report.h"
#include "client/cli/command.h"
#include "client/cli/load_generator.h"
#include "client/cli/output_names.h"
#include "client/cli/progress.h"
#include "client/cli/table.h"
#include "client/cli/workload.h"

namespace logprobd::client {
namespace {

struct BenchOptions {
  CommonOptions common;
  std::vector<int64_t> rows = {256};
  std::vector<int64_t> concurrency = {1};
  std::vector<double> request_rates;
  int64_t requests = 0;
  absl::Duration duration = absl::Seconds(5);
  int64_t warmup = 10;
  std::string dtype = "bf16";
  std::vector<std::string> outputs = {"logprob", "entropy"};
  int32_t top_k = 0;
  uint64_t seed = 1;
  std::string head;
  int32_t channels = Client::Options().channels;
  int32_t retries = 0;
  std::string export_path;
};

absl::StatusOr<Head> FindHead(Client& client, const std::string& name) {
  absl::StatusOr<ServerInfo> info = client.ListHeads();
  if (!info.ok()) return info.status();
  std::vector<std::string> names;
  for (Head& head : info->heads) {
    if (head.name == name || (name.empty() && info->heads.size() == 1)) return std::move(head);
    names.push_back(head.name);
  }
  if (names.empty()) return absl::UnavailableError("the server has no head loaded");
  return absl::NotFoundError(absl::StrCat(
      name.empty() ? "choose a head with --head" : absl::StrCat("no head \"", name, "\""),
      ": the server has ", absl::StrJoin(names, ", ")));
}

/// The names are checked when they are parsed.
Dtype ToDtype(const std::string& name) {
  if (name == "f16") return Dtype::kF16;
  return name == "f32" ? Dtype::kF32 : Dtype::kBf16;
}

/// Every combination that was asked for.
std::vector<LoadPlan> MakePlans(const BenchOptions& options) {
  LoadPlan plan{.requests = options.requests,
                .duration = options.duration,
                .warmup_requests = options.warmup,
                .seed = options.seed};
  std::vector<LoadPlan> plans;
  for (const double rate : options.request_rates) {
    plan.request_rate = rate;
    plans.push_back(plan);
  }
  if (!plans.empty()) return plans;
  for (const int64_t concurrency : options.concurrency) {
    plan.concurrency = concurrency;
    plans.push_back(plan);
  }
  return plans;
}

int RunBench(const BenchOptions& options, const CommandStreams& streams) {
  const absl::StatusOr<uint32_t> outputs = ParseOutputs(options.outputs);
  if (!outputs.ok()) {
    ReportError(streams, options.common, outputs.status());
    return kExitUsage;
  }
  absl::StatusOr<std::unique_ptr<Client>> client =
      Connect(options.common, {.channels = options.channels, .retries = options.retries});
  if (!client.ok()) return ReportError(streams, options.common, client.status());
  const absl::StatusOr<Head> head = FindHead(**client, options.head);
  if (!head.ok()) return ReportError(streams, options.common, head.status());

  std::vector<LoadResult> results;
  absl::Status first_error;
  ProgressLine progress(streams.err, streams.is_terminal);
  for (const int64_t rows : options.rows) {
    Workload workload(*head, ToDtype(options.dtype), rows, options.seed);
    workload.args().outputs = *outputs;
    workload.args().top_k = options.top_k;
    for (const LoadPlan& plan : MakePlans(options)) {
      const std::string what =
          plan.request_rate > 0
              ? absl::StrFormat("%s rows, %g requests/s", CountText(rows), plan.request_rate)
              : absl::StrFormat("%s rows, concurrency %d", CountText(rows), plan.concurrency);
      results.push_back(RunLoad(**client, workload, plan, [&](double share) {
        progress.Update(absl::StrFormat("%s: %.0f%%", what, share * 100));
      }));
      first_error.Update(results.back().first_error);
    }
  }
  progress.Clear();

  const nlohmann::ordered_json facts = {{"address", options.common.address},
                                        {"head", head->name},
                                        {"engine", head->engine},
                                        {"hidden_size", head->hidden_size},
                                        {"vocab_size", head->vocab_size},
                                        {"dtype", options.dtype},
                                        {"channels", options.channels},
                                        {"seed", options.seed}};
  if (options.common.json) {
    streams.out << BenchJson(facts, results).dump(2) << '\n';
  } else {
    streams.out << absl::StrCat("head ", head->name, " (", head->engine, "), vocabulary ",
                                CountText(head->vocab_size), ", hidden ",
                                CountText(head->hidden_size), " ", options.dtype, ", ",
                                options.channels, " connections\n\n");
    PrintBenchTable(results, streams.out);
  }
  if (!options.export_path.empty()) {
    if (absl::Status status = ExportBench(options.export_path, facts, results); !status.ok()) {
      return ReportError(streams, options.common, status);
    }
  }
  if (!first_error.ok()) {
    streams.err << "logprobctl: some requests failed, the first with "
                << absl::StatusCodeToString(first_error.code()) << ": " << first_error.message()
                << '\n';
    return kExitFailure;
  }
  return kExitOk;
}

void AddLoadOptions(CLI::App& command, BenchOptions& options) {
  const std::string group = "Load";
  command.add_option("--rows", options.rows, "Rows of a request; several: 1,256,8192")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str()
      ->group(group);
  command
      .add_option_function<std::string>(
          "--concurrency-range",
          [&options](const std::string& text) {
            const absl::StatusOr<std::vector<int64_t>> range = ParseRange(text);
            if (!range.ok()) {
              throw CLI::ValidationError("--concurrency-range",
                                         std::string(range.status().message()));
            }
            options.concurrency = *range;
          },
          "Requests always in flight, start:end:step")
      ->type_name("RANGE")
      ->default_str("1")
      ->group(group);
  command
      .add_option("--request-rate", options.request_rates,
                  "Requests a second at random times (open loop), instead of a concurrency")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::PositiveNumber)
      ->group(group);
  CLI::Option* requests =
      command.add_option("--requests", options.requests, "Requests to measure for each line")
          ->check(CLI::PositiveNumber)
          ->group(group);
  AddDurationOption(command, "--duration", options.duration, "Time to measure for each line");
  command.get_option("--duration")->excludes(requests)->group(group);
  command.add_option("--warmup", options.warmup, "Requests before measuring each line")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group(group);
  command.add_option("--seed", options.seed, "Of the random rows and arrivals")
      ->capture_default_str()
      ->group(group);
}

}  // namespace

void AddBenchCommand(CLI::App& app, CommandState& state) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand("bench", "How fast is the server, under which load?");
  AddCommonOptions(*command, options->common);
  AddLoadOptions(*command, *options);
  command->add_option("--dtype", options->dtype, "Type of the hidden states")
      ->check(CLI::IsMember({"bf16", "f16", "f32"}))
      ->capture_default_str()
      ->group("Request");
  command
      ->add_option("--outputs", options->outputs,
                   absl::StrCat("Of ", absl::StrJoin(OutputNames(), ", "), ", all"))
      ->delimiter(',')
      ->allow_extra_args(false)
      ->capture_default_str()
      ->group("Request");
  command->add_option("--top-k", options->top_k, "Best ids to return for each row")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group("Request");
  command->add_option("--head", options->head, "Head to load; the only one by default")
      ->group("Request");
  command->add_option("--channels", options->channels, "Connections")
      ->check(CLI::Range(1, 64))
      ->capture_default_str()
      ->group("Connection");
  command
      ->add_option("--retries", options->retries,
                   "Times a refused request is sent again; 0 counts it as an error")
      ->check(CLI::Range(0, 100))
      ->capture_default_str()
      ->group("Connection");
  command->add_option("--export", options->export_path, "Also write FILE.csv or FILE.json")
      ->check([](const std::string& path) {
        return IsExportPath(path) ? std::string() : path + " must end in .csv or .json";
      });
  command->footer(
      "Sends random rows of the head's hidden size and reports latency and throughput. A closed "
      "loop keeps a fixed number of requests in flight; --request-rate sends at random times and "
      "counts from the planned time, so that queueing shows. GB/s counts hidden states.\n\n"
      "Examples:\n"
      "  logprobctl bench\n"
      "  logprobctl bench --rows 1 --concurrency-range 1:16:5 --requests 2000\n"
      "  logprobctl bench --rows 256,8192 --concurrency-range 1:4 --duration 10s --export b.csv\n"
      "  logprobctl bench --rows 1 --request-rate 500,1000,2000");
  command->callback([options, &state] { state.exit_code = RunBench(*options, state.streams); });
}

}  // namespace logprobd::client
