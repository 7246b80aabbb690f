#include "client/cli/bench_report.h"

#include <fstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/table.h"

namespace logprobd::client {
namespace {

/// The columns of CSV and the keys of JSON, with how to read them: one list, so that they agree.
std::vector<std::pair<std::string, double>> Fields(const LoadResult& result) {
  return {{"rows", static_cast<double>(result.rows)},
          {"concurrency", static_cast<double>(result.concurrency)},
          {"request_rate", result.request_rate},
          {"requests", static_cast<double>(result.requests)},
          {"errors", static_cast<double>(result.errors)},
          {"seconds", result.seconds},
          {"rows_per_second", result.rows_per_second},
          {"gigabytes_per_second", result.gigabytes_per_second},
          {"latency_mean_seconds", result.latency.mean},
          {"latency_p50_seconds", result.latency.p50},
          {"latency_p90_seconds", result.latency.p90},
          {"latency_p95_seconds", result.latency.p95},
          {"latency_p99_seconds", result.latency.p99},
          {"latency_max_seconds", result.latency.max}};
}

}  // namespace

void PrintBenchTable(const std::vector<LoadResult>& results, std::ostream& out) {
  Table table({"rows", "concurrency", "requests", "errors", "rows/s", "GB/s", "avg ms", "p50 ms",
               "p90 ms", "p95 ms", "p99 ms", "max ms"});
  for (const LoadResult& result : results) {
    table.AddRow({CountText(result.rows),
                  result.request_rate > 0 ? absl::StrFormat("%g/s", result.request_rate)
                                          : CountText(result.concurrency),
                  CountText(result.requests), CountText(result.errors),
                  CountText(static_cast<int64_t>(result.rows_per_second)),
                  absl::StrFormat("%.3f", result.gigabytes_per_second),
                  MillisecondsText(result.latency.mean), MillisecondsText(result.latency.p50),
                  MillisecondsText(result.latency.p90), MillisecondsText(result.latency.p95),
                  MillisecondsText(result.latency.p99), MillisecondsText(result.latency.max)});
  }
  table.Print(out);
}

std::string BenchCsv(const std::vector<LoadResult>& results) {
  std::string csv;
  std::vector<std::string> cells;
  for (const auto& [name, value] : Fields({})) cells.push_back(name);
  absl::StrAppend(&csv, absl::StrJoin(cells, ","), "\n");
  for (const LoadResult& result : results) {
    cells.clear();
    for (const auto& [name, value] : Fields(result)) {
      cells.push_back(absl::StrFormat("%.9g", value));
    }
    absl::StrAppend(&csv, absl::StrJoin(cells, ","), "\n");
  }
  return csv;
}

nlohmann::ordered_json BenchJson(const nlohmann::ordered_json& facts,
                                 const std::vector<LoadResult>& results) {
  nlohmann::ordered_json report = facts;
  report["results"] = nlohmann::ordered_json::array();
  for (const LoadResult& result : results) {
    nlohmann::ordered_json entry;
    for (const auto& [name, value] : Fields(result)) entry[name] = value;
    if (!result.first_error.ok()) entry["first_error"] = result.first_error.ToString();
    report["results"].push_back(std::move(entry));
  }
  return report;
}

bool IsExportPath(const std::string& path) {
  return absl::EndsWith(path, ".csv") || absl::EndsWith(path, ".json");
}

absl::Status ExportBench(const std::string& path, const nlohmann::ordered_json& facts,
                         const std::vector<LoadResult>& results) {
  if (!IsExportPath(path)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " must end in .csv or .json"));
  }
  std::ofstream file(path, std::ios::trunc);
  if (absl::EndsWith(path, ".csv")) {
    file << BenchCsv(results);
  } else {
    file << BenchJson(facts, results).dump(2) << '\n';
  }
  file.close();
  if (!file) return absl::InvalidArgumentError(absl::StrCat("cannot write ", path));
  return absl::OkStatus();
}

}  // namespace logprobd::client
