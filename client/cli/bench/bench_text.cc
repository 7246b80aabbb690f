#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/bench/bench_report.h"
#include "client/cli/terminal.h"

namespace logprobd::client {
namespace {

/// Returns text such as "1.049". Small values have two significant digits, so that they do not read
/// as zero.
std::string GigabytesText(double value) {
  return value >= 0.1 || value == 0 ? absl::StrFormat("%.3f", value)
                                    : absl::StrFormat("%.2g", value);
}

/// The cells of a row and the names of their columns, which are the same for all rows of a table.
using NamedCells = std::vector<std::pair<std::string, std::string>>;

void PrintTable(const std::vector<NamedCells>& rows, std::ostream& out) {
  std::optional<Table> table;
  for (const NamedCells& row : rows) {
    std::vector<std::string> names;
    std::vector<std::string> texts;
    for (const auto& [name, text] : row) {
      names.push_back(name);
      texts.push_back(text);
    }
    if (!table.has_value()) table.emplace(std::move(names));
    table->AddRow(std::move(texts));
  }
  if (table.has_value()) table->Print(out);
}

/// Returns requests, throughput and latencies in milliseconds of a load or of one size of its mix.
NamedCells LoadCells(const BenchReport& report, const BenchLoad& load, std::string rows,
                     std::string concurrency, const SizeStats& stats) {
  const double rows_per_second = load.measurement.measured.PerSecond(stats.rows);
  NamedCells cells = {{"rows", std::move(rows)},
                      {"concurrency", std::move(concurrency)},
                      {"requests", CountText(stats.requests())},
                      {"errors", CountText(stats.errors)},
                      {"rows/s", CountText(static_cast<int64_t>(rows_per_second))},
                      {"GB/s", GigabytesText(report.gigabytes_per_second(rows_per_second))},
                      {"avg ms", MillisecondsText(stats.latency.mean())}};
  for (const double percentile : kPercentiles) {
    cells.emplace_back(absl::StrCat(PercentileName(percentile), " ms"),
                       MillisecondsText(stats.latency.Percentile(percentile)));
  }
  cells.emplace_back("max ms", MillisecondsText(stats.latency.max()));
  const std::optional<bool>& stable = load.measurement.stable;
  cells.emplace_back("stable", !stable.has_value() ? "-" : *stable ? "yes" : "no");
  cells.emplace_back("transport", stats.requests() > 0 ? stats.TransportText() : "-");
  return cells;
}

NamedCells ServerCells(const std::string& name, const ServerFigures& server) {
  double rejected = 0;
  for (const auto& [reason, count] : server.rejected) rejected += count;
  std::vector<std::string> gpus;
  for (const ServerFigures::Gpu& gpu : server.gpus) {
    gpus.push_back(absl::StrFormat("%s: %.0f%% busy, %.0f TFLOP/s", gpu.name, gpu.busy_ratio * 100,
                                   gpu.teraflops));
  }
  return {{"server", name},
          {"rows scored", CountText(static_cast<int64_t>(server.rows_scored))},
          {"batches", CountText(static_cast<int64_t>(server.batches))},
          {"rows/batch", absl::StrFormat("%.1f", server.batch_rows_mean)},
          {"queue peak", CountText(static_cast<int64_t>(server.queue_rows_peak))},
          {"rejected", CountText(static_cast<int64_t>(rejected))},
          {"CPU s", absl::StrFormat("%.2f", server.cpu_seconds)},
          {"CPU s/GB", absl::StrFormat("%.2f", server.cpu_seconds_per_gigabyte)},
          {"RSS peak", BytesText(static_cast<int64_t>(server.resident_bytes_peak))},
          {"GPU", gpus.empty() ? "-" : absl::StrJoin(gpus, "; ")}};
}

void PrintLoads(const BenchReport& report, std::ostream& out) {
  std::vector<NamedCells> table;
  for (const BenchLoad& load : report.loads) {
    const Interval& measured = load.measurement.measured;
    const std::vector<RowMix::Size>& sizes = load.plan.mix.sizes;
    const std::string rows = sizes.size() == 1 ? CountText(sizes[0].rows) : load.plan.mix.Text();
    const std::string concurrency = load.plan.is_open_loop()
                                        ? absl::StrFormat("%g/s", load.plan.request_rate)
                                        : CountText(load.plan.concurrency);
    table.push_back(LoadCells(report, load, rows, concurrency, measured.Total()));
    if (sizes.size() == 1) continue;
    for (size_t i = 0; i < measured.sizes.size(); ++i) {
      table.push_back(LoadCells(report, load, absl::StrCat("  of ", CountText(sizes[i].rows)), "",
                                measured.sizes[i]));
    }
  }
  PrintTable(table, out);
}

void PrintServer(const BenchReport& report, std::ostream& out) {
  std::vector<NamedCells> table;
  std::string stages;
  for (const BenchLoad& load : report.loads) {
    if (!load.server.has_value()) continue;
    table.push_back(ServerCells(load.Name(), *load.server));
    absl::StrAppend(&stages, load.Name(), ": mean ms per stage:");
    for (const ServerFigures::Stage& stage : load.server->stages) {
      absl::StrAppend(&stages, " ", stage.name, " ", MillisecondsText(stage.mean_seconds));
    }
    absl::StrAppend(&stages, "\n");
  }
  if (table.empty()) return;
  out << '\n';
  PrintTable(table, out);
  out << stages;
}

void PrintVerification(const Verification& verification, std::ostream& out) {
  const AnswerChecks& answers = verification.answers;
  out << "\nverify: " << (verification.passed() ? "PASS" : "FAIL") << '\n';
  const auto print = [&out](const char* when, const VerifyReport& report) {
    out << absl::StrFormat(
        "verify: the server's own check %s the loads: %s: %d rows against double precision, max "
        "|d logprob| %.2e (tolerance %.0e), max |d entropy| %.2e (tolerance %.0e)\n",
        when, report.passed ? "PASS" : "FAIL", report.rows, report.logprob_difference_max,
        report.logprob_tolerance, report.entropy_difference_max, report.entropy_tolerance);
  };
  print("before", verification.before);
  print("after", verification.after);
  out << absl::StrFormat(
      "verify: %s answered rows compared with the first answer to the same row: %s differ\n",
      CountText(answers.compared), CountText(answers.different));
  if (answers.compared == 0) {
    out << "verify: no row was answered twice: send more requests, or fewer rows per request\n";
  }
  if (answers.nonfinite > 0) {
    out << absl::StrFormat(
        "verify: %s answered rows have a logprob or entropy that is NaN or Inf\n",
        CountText(answers.nonfinite));
  }
  if (!answers.first_difference.empty()) {
    out << "verify: first difference: " << answers.first_difference << '\n';
  }
}

}  // namespace

std::vector<std::string> BenchWarnings(const BenchReport& report) {
  std::vector<std::string> warnings;
  if (!report.error.ok()) {
    warnings.push_back(absl::StrCat("the run ended early, so later loads are missing: ",
                                    absl::StatusCodeToString(report.error.code()), ": ",
                                    report.error.message()));
  }
  for (const BenchLoad& load : report.loads) {
    const LoadMeasurement& measurement = load.measurement;
    if (!measurement.stable.value_or(true)) {
      warnings.push_back(absl::StrFormat(
          "%s: not stable: throughput or %s latency of the last %d windows differs from the mean "
          "by more than %g%%; measure longer (--windows-max, --window) or on a less busy machine",
          load.Name(), PercentileName(load.plan.stability.percentile),
          WindowSeries::kWindowsCompared, load.plan.stability.share * 100));
    }
    const LateSends& late = measurement.measured.late;
    if (late.by_generator > 0) {
      warnings.push_back(absl::StrFormat(
          "%s: the load generator could not keep up: %s requests were sent more than 1 ms late (at "
          "most %s ms), which the latencies include; use a lower rate, more --writers or a "
          "separate machine for the generator",
          load.Name(), CountText(late.by_generator), MillisecondsText(late.generator_seconds_max)));
    }
    if (late.by_server > 0 || late.unsent > 0) {
      warnings.push_back(absl::StrFormat(
          "%s: the rate exceeds what the server can do: %s requests waited until one of %s in "
          "flight was answered (at most %s ms, which the latencies include), and %s were never "
          "sent",
          load.Name(), CountText(late.by_server), CountText(measurement.inflight_max),
          MillisecondsText(late.server_seconds_max), CountText(late.unsent)));
    }
  }
  return warnings;
}

void PrintBenchReport(const BenchReport& report, std::ostream& out) {
  PrintLoads(report, out);
  PrintServer(report, out);
  if (report.verification.has_value()) PrintVerification(*report.verification, out);
}

}  // namespace logprobd::client
