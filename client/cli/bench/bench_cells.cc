#include "client/cli/bench/bench_cells.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/table.h"

namespace logprobd::client {
namespace {

/// "1.049"; small ones with two digits, so that they are not shown as nothing.
std::string GigabytesText(double value) {
  return value >= 0.1 || value == 0 ? absl::StrFormat("%.3f", value)
                                    : absl::StrFormat("%.2g", value);
}

}  // namespace

std::vector<std::string> FigureHeader(const BenchReport& report) {
  std::vector<std::string> header = {"requests", "errors", "rows/s", "GB/s", "avg ms"};
  for (const double percentile : report.percentiles) {
    header.push_back(absl::StrCat(PercentileName(percentile), " ms"));
  }
  header.insert(header.end(), {"max ms", "stable", "transport"});
  return header;
}

std::vector<std::string> FigureCells(const BenchReport& report, const BenchLoad& load,
                                     const SizeStats& stats) {
  const double rows_per_second = load.measurement.measured.PerSecond(stats.rows);
  std::vector<std::string> cells = {CountText(stats.requests()), CountText(stats.errors),
                                    CountText(static_cast<int64_t>(rows_per_second)),
                                    GigabytesText(report.gigabytes_per_second(rows_per_second)),
                                    MillisecondsText(stats.latency.mean())};
  for (const double percentile : report.percentiles) {
    cells.push_back(MillisecondsText(stats.latency.Percentile(percentile)));
  }
  cells.push_back(MillisecondsText(stats.latency.max()));
  const std::optional<bool>& stable = load.measurement.stable;
  cells.emplace_back(!stable.has_value() ? "-" : *stable ? "yes" : "no");
  cells.push_back(stats.requests() > 0 ? stats.TransportText() : "-");
  return cells;
}

std::vector<std::string> ServerHeader() {
  return {"rows scored", "batches",  "rows/batch", "queue peak", "rejected",
          "CPU s",       "CPU s/GB", "RSS peak",   "GPU"};
}

std::vector<std::string> ServerCells(const ServerFigures& server) {
  double rejected = 0;
  for (const auto& [reason, count] : server.rejected) rejected += count;
  std::vector<std::string> gpus;
  for (const ServerFigures::Gpu& gpu : server.gpus) {
    gpus.push_back(absl::StrFormat("%s: %.0f%% busy, %.0f TFLOP/s", gpu.name, gpu.busy_ratio * 100,
                                   gpu.teraflops));
  }
  return {CountText(static_cast<int64_t>(server.rows_scored)),
          CountText(static_cast<int64_t>(server.batches)),
          absl::StrFormat("%.1f", server.batch_rows_mean),
          CountText(static_cast<int64_t>(server.queue_rows_peak)),
          CountText(static_cast<int64_t>(rejected)),
          absl::StrFormat("%.2f", server.cpu_seconds),
          absl::StrFormat("%.2f", server.cpu_seconds_per_gigabyte),
          BytesText(static_cast<int64_t>(server.resident_bytes_peak)),
          gpus.empty() ? "-" : absl::StrJoin(gpus, "; ")};
}

}  // namespace logprobd::client
