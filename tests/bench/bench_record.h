#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace CLI {
class App;
}  // namespace CLI

namespace logprobd::testing {

/// One measured figure, in the schema of README.md.
struct BenchRecord {
  std::string what;
  double figure = 0;  ///< Median of the rounds.
  std::string unit;
  std::pair<double, double> spread;  ///< Lowest and highest round.
  int rounds = 1;
  std::string baseline_what;              ///< Empty if there is no baseline.
  std::optional<double> baseline_figure;  ///< Median of its rounds in the same run.
  std::string note;
};

/// Makes a record of a figure that was measured in at least one round.
BenchRecord RecordOf(std::string what, std::string unit, std::vector<double> rounds);

double Median(std::vector<double> values);

/// Returns the processor and the number of cores that this process may use, for example
/// "Xeon 8480, 2 cores".
std::string MachineName();

/// Options that every benchmark takes.
struct BenchFlags {
  std::string out = {};            ///< JSON file to write. If empty, no file is written.
  std::string commit = "unknown";  ///< Commit to write into the records.
  int rounds = 5;
};

/// Adds --out, --commit and --rounds.
void AddBenchFlags(CLI::App& app, BenchFlags& flags);

/// Machine and commit on which records were measured.
struct BenchOrigin {
  std::string machine;  ///< Result of MachineName() or GpuMachineName().
  std::string commit;
};

/// Writes the records as JSON with their origin and the date. The path "-" is standard output.
absl::Status WriteRecords(const std::string& path, const BenchOrigin& origin,
                          const std::vector<BenchRecord>& records);

/// Writes the records of a run on `machine` if --out was given.
absl::Status WriteRecords(const BenchFlags& flags, const std::string& machine,
                          const std::vector<BenchRecord>& records);

/// Prints one line per record to standard output.
void PrintRecords(const std::vector<BenchRecord>& records);

/// Prints the error of a run, if there is one, and returns the exit code of the program.
int ExitCode(const std::string& program, const absl::Status& status);

}  // namespace logprobd::testing
