#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/cli/bench/load_generator.h"
#include "client/cli/bench/measurement.h"
#include "client/cli/bench/server_metrics.h"
#include "client/cli/bench/verification.h"
#include "nlohmann/json.hpp"

namespace logprobd::client {

/// One load and what it measured.
struct BenchLoad {
  LoadPlan plan;
  LoadMeasurement measurement;
  std::optional<ServerFigures> server;  ///< Figures of the whole run; absent without --metrics.

  /// "256 rows, 4 in flight"
  std::string Name() const;
};

/// The result of a run of `logprobctl bench`.
struct BenchReport {
  nlohmann::ordered_json info;  ///< Server, head, machine and command line as text and numbers.
  int64_t row_bytes = 0;        ///< Bytes of one hidden state.
  std::vector<double> percentiles = {50, 90, 95, 99, 99.9};
  std::vector<BenchLoad> loads;
  std::optional<Verification> verification;
  absl::Status error;  ///< The error that ended the run early, or OK.

  double gigabytes_per_second(double rows_per_second) const {
    return rows_per_second * static_cast<double>(row_bytes) / 1e9;
  }
};

/// "p99.9"
std::string PercentileName(double percentile);

/// Prints a table with one line per load and one per size of a mix, times in milliseconds; then the
/// server's figures and the verification. Warnings are not included.
void PrintBenchReport(const BenchReport& report, std::ostream& out);

/// Returns what a reader must know before using the numbers: that the run ended early, loads that
/// did not become stable, and late sends.
std::vector<std::string> BenchWarnings(const BenchReport& report);

/// Returns a header and one line per load and per size of a mix; times in seconds.
std::string BenchCsv(const BenchReport& report);

/// Returns the info and the loads with all windows, sizes and whole histograms; times in seconds.
nlohmann::ordered_json BenchJson(const BenchReport& report);

/// Whether ExportBench can write files with the extension of `path`: .csv or .json.
bool IsExportPath(const std::string& path);

/// Checks that the path can be written, without changing an existing file. INVALID_ARGUMENT
/// otherwise.
absl::Status CheckExportPath(const std::string& path);

/// Writes the report in the format of the path's extension. INVALID_ARGUMENT for another extension
/// or a path that cannot be written.
absl::Status ExportBench(const std::string& path, const BenchReport& report);

/// The machine that ran the load. Its name is left out on purpose: reports are published.
struct MachineInfo {
  std::string cpu_model;  ///< "unknown" if the system does not say.
  int cores = 1;          ///< Number of cores that this process may use.
  std::string date;       ///< UTC, "2026-11-21T22:16:00Z".
};

MachineInfo ReadMachineInfo();

/// Returns the value of "model name" in the text of /proc/cpuinfo, or "unknown".
std::string CpuModelOf(absl::string_view cpuinfo);

/// Returns a command line for a shell: arguments with special characters are quoted.
std::string CommandLineText(const std::vector<std::string>& arguments);

}  // namespace logprobd::client
