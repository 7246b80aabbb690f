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
#include "client/cli/bench/baseline.h"
#include "client/cli/bench/bench_options.h"
#include "client/cli/bench/bench_report.h"
#include "client/cli/bench/cuda_memory.h"
#include "client/cli/bench/load_generator.h"
#include "client/cli/bench/machine_info.h"
#include "client/cli/bench/metrics_scraper.h"
#include "client/cli/bench/model_head.h"
#include "client/cli/bench/verification.h"
#include "client/cli/command.h"
#include "client/cli/output_names.h"
#include "client/cli/progress.h"
#include "client/cli/table.h"

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
      name.empty() ? "choose a head with --head" : absl::StrCat("no head \"", name, "\""),
      ": the server has ", absl::StrJoin(names, ", ")));
}

/// The names are checked when they are parsed.
Dtype ToDtype(const std::string& name) {
  if (name == "f16") return Dtype::kF16;
  return name == "f32" ? Dtype::kF32 : Dtype::kBf16;
}

/// Passes a run's events on: to the line of progress, the server's metrics and the book of answers.
class BenchObserver final : public LoadObserver {
 public:
  BenchObserver(const CommandStreams& streams, Baseline* answers, MetricsScraper* metrics)
      : progress_(streams.err, streams.is_terminal),
        err_(streams.err),
        answers_(answers),
        metrics_(metrics) {}

  void BeginLoad(const std::string& name) {
    name_ = name;
    figures_.reset();
  }
  const std::optional<ServerFigures>& figures() const { return figures_; }
  ProgressLine& progress() { return progress_; }

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
    if (answers_ != nullptr) answers_->Add(first, result);
  }

 private:
  /// The load goes on without the server's figures.
  void Report(const absl::Status& status) {
    if (status.ok()) return;
    progress_.Clear();
    err_ << "logprobctl: " << name_ << ": " << status.message() << '\n';
  }

  ProgressLine progress_;
  std::ostream& err_;
  Baseline* const answers_;
  MetricsScraper* const metrics_;
  std::string name_;
  std::optional<ServerFigures> figures_;
};

/// One run of the command, from the connection to the exports.
class Bench {
 public:
  Bench(const BenchOptions& options, const CommandState& state)
      : options_(options), state_(state), streams_(state.streams) {}

  int Run() {
    if (const absl::Status status = Prepare(); !status.ok()) {
      return ReportError(streams_, options_.common, status);
    }
    report_.error = RunLoads();
    if (report_.loads.empty()) return ReportError(streams_, options_.common, report_.error);
    return Report();
  }

  /// Before anything is sent; a mistake here is one of usage.
  absl::Status CheckOutputs() {
    const absl::StatusOr<uint32_t> outputs = ParseOutputs(options_.outputs);
    if (!outputs.ok()) return outputs.status();
    request_.outputs = *outputs;
    constexpr uint32_t kNeeded = output::kLogprob | output::kEntropy;
    if (!options_.verify_folder.empty() && (*outputs & kNeeded) != kNeeded) {
      return absl::InvalidArgumentError("--verify needs logprob and entropy among --outputs");
    }
    return absl::OkStatus();
  }

 private:
  /// Everything that can fail before the load: a long run must not end in a mistake of its start.
  absl::Status Prepare() {
    absl::StatusOr<std::unique_ptr<Client>> client =
        Connect(options_.common, BenchClientOptions(options_));
    if (!client.ok()) return client.status();
    client_ = *std::move(client);
    absl::StatusOr<ServerInfo> info = client_->ListHeads();
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
      absl::StatusOr<MetricsSource> source = HttpMetricsSource(options_.metrics_url);
      if (!source.ok()) return source.status();
      metrics_source_ = *std::move(source);
      if (absl::Status status = metrics_source_().status(); !status.ok()) return status;
      metrics_ = std::make_unique<MetricsScraper>(metrics_source_, head_.name);
    }
    if (!options_.verify_folder.empty()) {
      absl::Status status = OpenModelHead(options_.verify_folder, head_).status();
      if (!status.ok()) return status;
    }
    if (options_.transport == TransportChoice::kCudaIpc) {
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
        RowPool::Create(head_, ToDtype(options_.dtype), rows_max, options_.plan.seed, memory_);
    if (!pool.ok()) return pool.status();
    pool_ = *std::move(pool);
    if (!options_.verify_folder.empty()) {
      answers_ = std::make_unique<Baseline>(pool_->distinct_rows());
    }
    return absl::OkStatus();
  }

  /// Exports after each load: whatever ends the program later, what it has found is there.
  absl::Status RunLoads() {
    BenchObserver observer(streams_, answers_.get(), metrics_.get());
    ClientTarget target(*client_);
    ClientRowMemory fresh_memory(*client_);
    for (const LoadPlan& plan : MakePlans(options_)) {
      BenchLoad load{.plan = plan, .measurement = {}, .server = std::nullopt};
      observer.BeginLoad(load.Name());
      absl::StatusOr<LoadMeasurement> measurement =
          RunLoad({.target = target,
                   .pool = *pool_,
                   .memory = fresh_memory,
                   .device = device_ ? &*device_ : nullptr,
                   .request = request_,
                   .observer = observer},
                  plan);
      if (!measurement.ok()) return measurement.status();
      load.measurement = *std::move(measurement);
      load.server = observer.figures();
      report_.loads.push_back(std::move(load));
      if (absl::Status status = Export(); !status.ok()) return status;
    }
    if (answers_ != nullptr) {
      absl::StatusOr<Verification> verification =
          VerifyAnswers(*answers_, *pool_, head_, options_.verify_folder, options_.verify_rows,
                        [&observer](double share) {
                          observer.progress().Update(absl::StrFormat(
                              "verifying in double precision: %.0f%%", share * 100));
                        });
      if (!verification.ok()) return verification.status();
      report_.verification = *std::move(verification);
    }
    return absl::OkStatus();
  }

  /// Fills in everything but the loads.
  void Describe() {
    const MachineInfo machine = ReadMachineInfo();
    report_.title = absl::StrCat("Load of head ", head_.name, ", ", head_.engine);
    report_.row_bytes = pool_->row_bytes();
    report_.facts = {{"address", options_.common.address},
                     {"head", head_.name},
                     {"engine", head_.engine},
                     {"server_version", server_version_},
                     {"hidden_size", head_.hidden_size},
                     {"vocab_size", head_.vocab_size},
                     {"weights_version", head_.weights_version},
                     {"dtype", options_.dtype},
                     {"outputs", absl::StrJoin(options_.outputs, ",")},
                     {"top_k", options_.top_k},
                     {"method", options_.method},
                     {"transport_reason", client_->transport_reason()},
                     {"channels", options_.channels},
                     {"seed", options_.plan.seed},
                     {"client_version", LOGPROBD_VERSION},
                     {"client_cpu", machine.cpu_model},
                     {"client_cores", machine.cores},
                     {"date", machine.date},
                     {"command", CommandLineText(state_.arguments)}};
    std::vector<double>& percentiles = report_.percentiles;
    percentiles.insert(percentiles.end(), options_.percentiles.begin(), options_.percentiles.end());
    std::sort(percentiles.begin(), percentiles.end());
    percentiles.erase(std::unique(percentiles.begin(), percentiles.end()), percentiles.end());
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
      streams_.out << absl::StrCat(
          "head ", head_.name, " (", head_.engine, "), vocabulary ", CountText(head_.vocab_size),
          ", hidden ", CountText(head_.hidden_size), " ", options_.dtype, ", ", options_.method,
          " over ", options_.channels, " connections\n\n");
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
      streams_.err << "logprobctl: the answers do not pass the verification: do not trust this "
                      "server's numbers, and keep its log\n";
    }
    const bool is_good = report_.error.ok() && first_error.ok() && !has_failed_verification;
    return is_good ? kExitOk : kExitFailure;
  }

  const BenchOptions& options_;
  const CommandState& state_;
  const CommandStreams& streams_;
  HeapRowMemory memory_;
  std::optional<CudaMemory> device_;
  ScoreArgs request_;
  std::unique_ptr<Client> client_;
  std::string server_version_;
  Head head_;
  MetricsSource metrics_source_;
  std::unique_ptr<MetricsScraper> metrics_;
  std::optional<RowPool> pool_;
  std::unique_ptr<Baseline> answers_;
  BenchReport report_;
};

int RunBench(const BenchOptions& options, const CommandState& state) {
  Bench bench(options, state);
  if (const absl::Status status = bench.CheckOutputs(); !status.ok()) {
    ReportError(state.streams, options.common, status);
    return kExitUsage;
  }
  return bench.Run();
}

}  // namespace

void AddBenchCommand(CLI::App& app, CommandState& state) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      app.add_subcommand("bench", "How fast is the server, under which load, and is it right?");
  AddCommonOptions(*command, options->common);
  AddBenchOptions(*command, *options);
  command->callback([options, &state] { state.exit_code = RunBench(*options, state); });
}

}  // namespace logprobd::client
