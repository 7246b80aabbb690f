#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/bench/bench_options.h"
#include "client/cli/bench/bench_report.h"
#include "client/cli/bench/cuda_memory.h"
#include "client/cli/bench/load_generator.h"
#include "client/cli/bench/server_metrics.h"
#include "client/cli/bench/verification.h"
#include "client/cli/command.h"
#include "client/cli/terminal.h"

namespace logprobd::client {
namespace {

absl::StatusOr<Head> FindHead(const ServerInfo& info, const std::string& name) {
  std::vector<std::string> names;
  for (const Head& head : info.heads) {
    if (head.name == name || (name.empty() && info.heads.size() == 1)) return head;
    names.push_back(head.name);
  }
  if (names.empty()) return absl::UnavailableError("the server has no head loaded");
  return absl::NotFoundError(absl::StrCat(
      name.empty() ? "choose a head with --head" : absl::StrCat("there is no head \"", name, "\""),
      ": the server has ", absl::StrJoin(names, ", ")));
}

/// Returns the dtype of a name that the parser accepted.
Dtype ToDtype(const std::string& name) {
  if (name == "f16") return Dtype::kF16;
  return name == "f32" ? Dtype::kF32 : Dtype::kBf16;
}

/// Passes the events of a run to the progress line, the metrics scraper and the baseline.
class BenchObserver final : public LoadObserver {
 public:
  BenchObserver(const CommandStreams& streams, Baseline* baseline, MetricsScraper* metrics)
      : progress_(streams.err, streams.is_terminal),
        err_(streams.err),
        baseline_(baseline),
        metrics_(metrics) {}

  void BeginLoad(const std::string& name) {
    name_ = name;
    figures_.reset();
  }
  const std::optional<ServerFigures>& figures() const { return figures_; }

  void MeasureBegins() override {
    if (metrics_ != nullptr) Report(metrics_->Begin());
  }
  void MeasureEnds() override {
    if (metrics_ == nullptr) return;
    const absl::StatusOr<ServerFigures> figures = metrics_->End();
    if (figures.ok()) figures_ = *figures;
    Report(figures.status());
  }
  void Progress(double share) override {
    progress_.Update(absl::StrFormat("%s: %.0f%%", name_, share * 100));
  }
  void Answered(int64_t first, int64_t /*rows*/, const ScoreResult& result) override {
    if (baseline_ != nullptr) baseline_->Add(first, result);
  }

 private:
  /// Reports a failed scrape; the load continues without the server's figures.
  void Report(const absl::Status& status) {
    if (status.ok()) return;
    progress_.Clear();
    err_ << "logprobctl: " << name_ << ": " << status.message() << '\n';
  }

  ProgressLine progress_;
  std::ostream& err_;
  Baseline* const baseline_;
  MetricsScraper* const metrics_;
  std::string name_;
  std::optional<ServerFigures> figures_;
};

/// One run of the command, from connecting to exporting the report.
class Bench {
 public:
  Bench(const BenchOptions& options, uint32_t outputs, const CommandState& state)
      : options_(options), state_(state), streams_(state.streams) {
    request_.outputs = outputs;
  }

  int Run() {
    if (const absl::Status status = Prepare(); !status.ok()) {
      return ReportError(streams_, options_.common, status);
    }
    report_.error = RunLoads();
    if (report_.loads.empty()) return ReportError(streams_, options_.common, report_.error);
    return Report();
  }

 private:
  /// Checks everything that can fail before the first load, so that a long run does not fail at its
  /// end because of a wrong option.
  absl::Status Prepare() {
    absl::StatusOr<std::unique_ptr<Client>> client =
        Connect(options_.common, WithRetries(options_.retries, options_.client));
    if (!client.ok()) return client.status();
    client_ = *std::move(client);
    absl::StatusOr<ServerInfo> info = ListHeads(*client_, options_.common, streams_);
    if (!info.ok()) return info.status();
    server_version_ = info->server_version;
    absl::StatusOr<Head> head = FindHead(*info, options_.head);
    if (!head.ok()) return head.status();
    head_ = *std::move(head);
    request_.head = head_.name;
    request_.top_k = options_.top_k;

    for (const std::string& path : options_.export_paths) {
      if (absl::Status status = CheckExportPath(path); !status.ok()) return status;
    }
    if (!options_.metrics_url.empty()) {
      absl::StatusOr<MetricsSource> source =
          HttpMetricsSource(options_.metrics_url, options_.common.token);
      if (!source.ok()) return source.status();
      metrics_source_ = *std::move(source);
      if (absl::Status status = metrics_source_().status(); !status.ok()) return status;
      metrics_ = std::make_unique<MetricsScraper>(metrics_source_, head_.name);
    }
    if (options_.client.transport == TransportChoice::kCudaIpc) {
      absl::StatusOr<CudaMemory> device = CudaMemory::Open(options_.gpu);
      if (!device.ok()) {
        return {device.status().code(),
                absl::StrCat("--transport cuda-ipc: ", device.status().message())};
      }
      device_ = *std::move(device);
    }
    int64_t rows_max = 1;
    for (const RowMix& mix : options_.rows) rows_max = std::max(rows_max, mix.rows_max());
    absl::StatusOr<RowPool> pool =
        RowPool::Create(head_, ToDtype(options_.dtype), rows_max, options_.plan.seed);
    if (!pool.ok()) return pool.status();
    pool_ = *std::move(pool);
    if (options_.verify) {
      baseline_ = std::make_unique<Baseline>(pool_->distinct_rows());
      absl::StatusOr<VerifyReport> before = client_->Verify({.head = head_.name});
      if (!before.ok()) return before.status();
      verification_.before = *std::move(before);
      if (!verification_.before.passed) {
        return absl::FailedPreconditionError(
            "the server's own check failed before the load, so nothing was measured; see "
            "'logprobctl selftest', or measure without --verify");
      }
    }
    return absl::OkStatus();
  }

  /// Runs the loads and exports the report after each, so that a later failure loses no result.
  absl::Status RunLoads() {
    BenchObserver observer(streams_, baseline_.get(), metrics_.get());
    ClientTarget target(*client_);
    for (const LoadPlan& plan : MakePlans(options_)) {
      BenchLoad load{.plan = plan, .measurement = {}, .server = std::nullopt};
      observer.BeginLoad(load.Name());
      absl::StatusOr<LoadMeasurement> measurement =
          RunLoad({.target = target,
                   .pool = *pool_,
                   .request = request_,
                   .allocate = [this](int64_t bytes) { return client_->AllocateRows(bytes); },
                   .device = device_ ? &*device_ : nullptr,
                   .observer = observer},
                  plan);
      if (!measurement.ok()) return measurement.status();
      load.measurement = *std::move(measurement);
      load.server = observer.figures();
      report_.loads.push_back(std::move(load));
      if (absl::Status status = Export(); !status.ok()) return status;
    }
    return baseline_ == nullptr ? absl::OkStatus() : Verify();
  }

  absl::Status Verify() {
    absl::StatusOr<VerifyReport> after = client_->Verify({.head = head_.name});
    if (!after.ok()) return after.status();
    verification_.after = *std::move(after);
    verification_.answers = baseline_->checks();
    report_.verification = verification_;
    return absl::OkStatus();
  }

  /// Fills in everything except the loads.
  void Describe() {
    report_.row_bytes = pool_->row_bytes();
    report_.info = {{"address", options_.common.address},
                    {"head", head_.name},
                    {"engine", head_.engine},
                    {"server_version", server_version_},
                    {"hidden_size", head_.hidden_size},
                    {"vocab_size", head_.vocab_size},
                    {"weights_version", head_.weights_version},
                    {"dtype", options_.dtype},
                    {"outputs", absl::StrJoin(options_.outputs, ",")},
                    {"top_k", options_.top_k},
                    {"transport_reason", client_->transport_reason()},
                    {"channels", options_.client.channels},
                    {"seed", options_.plan.seed},
                    {"client_version", LOGPROBD_VERSION}};
    report_.info.update(MachineJson());
    report_.info["command"] = CommandLineText(state_.arguments);
  }

  absl::Status Export() {
    Describe();
    for (const std::string& path : options_.export_paths) {
      if (absl::Status status = ExportBench(path, report_); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  int Report() {
    const absl::Status exported = Export();
    if (options_.common.json) {
      streams_.out << BenchJson(report_).dump(2) << '\n';
    } else {
      streams_.out << absl::StrCat("head ", head_.name, " (", head_.engine, "), vocabulary ",
                                   CountText(head_.vocab_size), ", hidden ",
                                   CountText(head_.hidden_size), " ", options_.dtype, ", ",
                                   options_.client.channels, " connections\n\n");
      PrintBenchReport(report_, streams_.out);
    }
    for (const std::string& warning : BenchWarnings(report_)) {
      streams_.err << "logprobctl: " << warning << '\n';
    }
    if (!exported.ok()) streams_.err << "logprobctl: " << exported.message() << '\n';
    return exported.ok() ? ExitCode() : kExitFailure;
  }

  int ExitCode() const {
    absl::Status first_error;
    for (const BenchLoad& load : report_.loads) {
      first_error.Update(load.measurement.measured.first_error);
    }
    if (!first_error.ok()) {
      streams_.err << "logprobctl: some requests failed, the first with "
                   << absl::StatusCodeToString(first_error.code()) << ": " << first_error.message()
                   << '\n';
    }
    const bool has_failed_verification =
        report_.verification.has_value() && !report_.verification->passed();
    if (has_failed_verification) {
      streams_.err << "logprobctl: the verification failed; do not use this server's scores, and "
                      "keep its log\n";
    }
    const bool is_good = report_.error.ok() && first_error.ok() && !has_failed_verification;
    return is_good ? kExitOk : kExitFailure;
  }

  const BenchOptions& options_;
  const CommandState& state_;
  const CommandStreams& streams_;
  std::optional<CudaMemory> device_;
  ScoreArgs request_;
  std::unique_ptr<Client> client_;
  std::string server_version_;
  Head head_;
  MetricsSource metrics_source_;
  std::unique_ptr<MetricsScraper> metrics_;
  std::optional<RowPool> pool_;
  std::unique_ptr<Baseline> baseline_;  ///< Null without --verify.
  Verification verification_;
  BenchReport report_;
};

int RunBench(const BenchOptions& options, const CommandState& state) {
  const absl::StatusOr<uint32_t> outputs = ParseOutputs(options.outputs);
  if (!outputs.ok()) {
    ReportError(state.streams, options.common, outputs.status());
    return kExitUsage;
  }
  return Bench(options, *outputs, state).Run();
}

}  // namespace

void AddBenchCommand(CLI::App& app, CommandState& state) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand(
      "bench", "Measure latency and throughput under a load, and verify the answers");
  AddCommonOptions(*command, options->common);
  AddBenchOptions(*command, *options);
  command->callback([options, &state] { state.exit_code = RunBench(*options, state); });
}

}  // namespace logprobd::client
