#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/bench/load_generator.h"
#include "client/cli/bench/load_result.h"
#include "client/cli/bench/server_figures.h"
#include "client/cli/bench/verification.h"
#include "nlohmann/json.hpp"

namespace logprobd::client {

/// What one load gave.
struct BenchLoad {
  LoadPlan plan;
  LoadMeasurement measurement;
  std::optional<ServerFigures> server;  ///< Of the whole run; where metrics were asked for.

  /// "256 rows, 4 in flight"
  std::string Name() const;
  double rows_per_second() const;
};

/// Everything that a run of `logprobctl bench` found.
struct BenchReport {
  nlohmann::ordered_json facts;  ///< Server, head, machine, command line: text and numbers.
  std::string title;             ///< Of people's reports: the head.
  int64_t row_bytes = 0;         ///< Of hidden states.
  std::vector<double> percentiles = {50, 90, 95, 99, 99.9};
  std::vector<BenchLoad> loads;
  std::optional<Verification> verification;
  absl::Status error;  ///< What ended the run before all of it was measured.

  double gigabytes_per_second(double rows_per_second) const {
    return rows_per_second * static_cast<double>(row_bytes) / 1e9;
  }
};

/// "p99.9"
std::string PercentileName(double percentile);

/// A table with one line a load, and one for each size of a mix, times in milliseconds; then what
/// one should know before using the numbers, the server's figures and the verification.
void PrintBenchReport(const BenchReport& report, std::ostream& out);

/// What one should know before using the numbers: that the run ended early, loads that did not
/// become stable, late sends.
std::vector<std::string> BenchWarnings(const BenchReport& report);

/// One line a load, and one for each size of a mix, with a header; times in seconds.
std::string BenchCsv(const BenchReport& report);

/// The facts and the loads with all windows, sizes and whole histograms; times in seconds.
nlohmann::ordered_json BenchJson(const BenchReport& report);

/// Whether ExportBench knows the extension: .csv, .json or .html.
bool IsExportPath(const std::string& path);

/// Whether the path can be written; what is there stays as it is. INVALID_ARGUMENT otherwise.
absl::Status CheckExportPath(const std::string& path);

/// Writes the report in the format of the path's extension. INVALID_ARGUMENT for another one or a
/// path that cannot be written.
absl::Status ExportBench(const std::string& path, const BenchReport& report);

}  // namespace logprobd::client
