#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/bench/bench_cells.h"
#include "client/cli/bench/bench_report.h"
#include "client/cli/table.h"

namespace logprobd::client {
namespace {

void PrintLoads(const BenchReport& report, std::ostream& out) {
  const auto add = [](Table& table, std::vector<std::string> names,
                      const std::vector<std::string>& figures) {
    names.insert(names.end(), figures.begin(), figures.end());
    table.AddRow(std::move(names));
  };
  std::vector<std::string> header = {"rows", "concurrency"};
  const std::vector<std::string> figures = FigureHeader(report);
  header.insert(header.end(), figures.begin(), figures.end());
  Table table(header);
  for (const BenchLoad& load : report.loads) {
    const Interval& measured = load.measurement.measured;
    const std::vector<RowMix::Size>& sizes = load.plan.mix.sizes;
    const std::string rows = sizes.size() == 1 ? CountText(sizes[0].rows) : load.plan.mix.Text();
    const std::string how = load.plan.request_rate > 0
                                ? absl::StrFormat("%g/s", load.plan.request_rate)
                                : CountText(load.plan.concurrency);
    add(table, {rows, how}, FigureCells(report, load, measured.Total()));
    if (sizes.size() == 1) continue;
    for (size_t i = 0; i < measured.sizes.size(); ++i) {
      add(table, {absl::StrCat("  of ", CountText(sizes[i].rows)), ""},
          FigureCells(report, load, measured.sizes[i]));
    }
  }
  table.Print(out);
}

void PrintServer(const BenchReport& report, std::ostream& out) {
  std::vector<std::string> header = ServerHeader();
  header.insert(header.begin(), "server");
  Table table(header);
  std::string stages;
  for (const BenchLoad& load : report.loads) {
    if (!load.server.has_value()) continue;
    std::vector<std::string> cells = ServerCells(*load.server);
    cells.insert(cells.begin(), load.Name());
    table.AddRow(std::move(cells));
    absl::StrAppend(&stages, load.Name(), ": mean ms of");
    for (const ServerFigures::Stage& stage : load.server->stages) {
      absl::StrAppend(&stages, " ", stage.name, " ", MillisecondsText(stage.mean_seconds));
    }
    absl::StrAppend(&stages, "\n");
  }
  if (stages.empty()) return;
  out << '\n';
  table.Print(out);
  out << stages;
}

void PrintVerification(const Verification& verification, std::ostream& out) {
  out << absl::StrFormat(
      "\nverify: %s: %d rows against double precision: max |d logprob| %.2e (tolerance %.0e), max "
      "|d entropy| %.2e (tolerance %.0e); %s answers compared with the first to the same row, %s "
      "with other bits\n",
      verification.passed() ? "PASS" : "FAIL", verification.rows,
      verification.logprob_difference_max, verification.logprob_tolerance,
      verification.entropy_difference_max, verification.entropy_tolerance,
      CountText(verification.answers_compared), CountText(verification.answers_different));
  if (!verification.first_difference.empty()) {
    out << "verify: the first difference: " << verification.first_difference << '\n';
  }
}

}  // namespace

std::vector<std::string> BenchWarnings(const BenchReport& report) {
  std::vector<std::string> warnings;
  if (!report.error.ok()) {
    warnings.push_back(absl::StrCat("the run ended early, what came after is missing: ",
                                    absl::StatusCodeToString(report.error.code()), ": ",
                                    report.error.message()));
  }
  for (const BenchLoad& load : report.loads) {
    const LoadMeasurement& measurement = load.measurement;
    if (!measurement.stable.value_or(true)) {
      warnings.push_back(absl::StrFormat(
          "%s: not stable: throughput and %s of the last %d windows differ by more than %g%%; "
          "measure longer (--windows-max, --window) or on a quieter machine",
          load.Name(), PercentileName(load.plan.stability.percentile),
          WindowSeries::kWindowsCompared, load.plan.stability.share * 100));
    }
    const LateSends& late = measurement.measured.late;
    if (late.by_generator > 0) {
      warnings.push_back(absl::StrFormat(
          "%s: the generator itself could not keep up: %s requests left more than 1 ms late, at "
          "most %s ms; the latencies include it: use a lower rate, more --writers or a machine of "
          "its own",
          load.Name(), CountText(late.by_generator), MillisecondsText(late.generator_seconds_max)));
    }
    if (late.by_server > 0 || late.unsent > 0) {
      warnings.push_back(absl::StrFormat(
          "%s: the rate is beyond the server: %s requests waited for one of %s in flight to be "
          "answered, at most %s ms, which the latencies include, and %s were never sent",
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
