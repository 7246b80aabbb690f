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

/// The percentiles of the latencies that are reported.
inline constexpr double kPercentiles[] = {50, 90, 95, 99, 99.9};

/// One load and its measurement.
struct BenchLoad {
  LoadPlan plan;
  LoadMeasurement measurement;
  std::optional<ServerFigures> server;  ///< Figures of the whole run; absent without --metrics.

  /// Returns a name such as "256 rows, 4 in flight".
  std::string Name() const;
};

/// The result of a run of `logprobctl bench`.
struct BenchReport {
  nlohmann::ordered_json info;  ///< Server, head, machine and command line as text and numbers.
  int64_t row_bytes = 0;        ///< Bytes of one hidden state.
  std::vector<BenchLoad> loads;
  std::optional<Verification> verification;
  absl::Status error;  ///< The error that ended the run early, or OK.

  double gigabytes_per_second(double rows_per_second) const {
    return rows_per_second * static_cast<double>(row_bytes) / 1e9;
  }
};

/// Returns a name such as "p99.9".
std::string PercentileName(double percentile);

/// Prints a table with one line per load and one per size of a mix, with times in milliseconds,
/// and then the server's figures and the verification. It does not print the warnings.
void PrintBenchReport(const BenchReport& report, std::ostream& out);

/// Returns the warnings that a reader must know before using the numbers: an early end of the run,
/// loads that did not become stable, and late sends.
std::vector<std::string> BenchWarnings(const BenchReport& report);

/// Returns the info and the loads with all windows, sizes and whole histograms. Times are in
/// seconds.
nlohmann::ordered_json BenchJson(const BenchReport& report);

/// Checks that the path can be written, without changing an existing file. Returns
/// INVALID_ARGUMENT if it cannot.
absl::Status CheckExportPath(const std::string& path);

/// Writes the report as JSON. Returns INVALID_ARGUMENT if the path cannot be written.
absl::Status ExportBench(const std::string& path, const BenchReport& report);

/// Returns this machine's processor, the number of cores that this process may use, and the time
/// (UTC). The machine's name is left out on purpose: reports are published.
nlohmann::ordered_json MachineJson();

/// Returns the value of "model name" in the text of /proc/cpuinfo, or "unknown".
std::string CpuModelOf(absl::string_view cpuinfo);

/// Returns a command line for a shell: arguments with special characters are quoted.
std::string CommandLineText(const std::vector<std::string>& arguments);

}  // namespace logprobd::client
