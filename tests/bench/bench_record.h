#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace logprobd::testing {

/// One measured figure, in the schema of README.md.
struct BenchRecord {
  std::string what;
  double figure = 0;  ///< Median of `rounds`.
  std::string unit;
  std::pair<double, double> spread;  ///< Lowest and highest round.
  int rounds = 1;
  std::string baseline_what;              ///< Empty: no baseline.
  std::optional<double> baseline_figure;  ///< Median, of the same run.
  std::string note;
};

/// A record of a figure taken in several rounds, at least one.
BenchRecord RecordOf(std::string what, std::string unit, std::vector<double> rounds);

double Median(std::vector<double> values);

/// Processor and the cores this process may use, as "Xeon 8480, 2 cores".
std::string MachineName();

/// Where records were measured.
struct BenchOrigin {
  std::string machine;  ///< MachineName(), or a device's facts.
  std::string commit;
};

/// Writes the records as JSON with their origin and the date; "-" is standard output.
absl::Status WriteRecords(const std::string& path, const BenchOrigin& origin,
                          const std::vector<BenchRecord>& records);

}  // namespace logprobd::testing
