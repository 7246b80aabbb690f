#include "tests/bench/bench_record.h"

#include <sched.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <iostream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"

namespace logprobd::testing {

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

BenchRecord RecordOf(std::string what, std::string unit, std::vector<double> rounds) {
  const auto [low, high] = std::minmax_element(rounds.begin(), rounds.end());
  return {.what = std::move(what),
          .figure = Median(rounds),
          .unit = std::move(unit),
          .spread = {*low, *high},
          .rounds = static_cast<int>(rounds.size()),
          .baseline_what = "",
          .baseline_figure = std::nullopt,
          .note = ""};
}

std::string MachineName() {
  std::string model = "unknown CPU";
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      model = line.substr(colon + 1);
      absl::RemoveExtraAsciiWhitespace(&model);
      break;
    }
  }
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const int count = sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 0;
  return absl::StrCat(model, ", ", count, " cores");
}

void AddBenchFlags(CLI::App& app, BenchFlags& flags) {
  app.add_option("--out", flags.out, "JSON file to write the records to; default: no file")
      ->type_name("FILE");
  app.add_option("--commit", flags.commit, "Commit to write into the records")
      ->type_name("ID")
      ->capture_default_str();
  app.add_option("--rounds", flags.rounds, "Number of rounds; figures are medians over the rounds")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
}

absl::Status WriteRecords(const std::string& path, const BenchOrigin& origin,
                          const std::vector<BenchRecord>& records) {
  const std::string date = absl::FormatTime("%Y-%m-%d", absl::Now(), absl::UTCTimeZone());
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const BenchRecord& record : records) {
    nlohmann::ordered_json entry = {{"what", record.what},
                                    {"machine", origin.machine},
                                    {"date", date},
                                    {"commit", origin.commit},
                                    {"figure", record.figure},
                                    {"unit", record.unit},
                                    {"spread", {record.spread.first, record.spread.second}},
                                    {"rounds", record.rounds},
                                    {"baseline", nullptr},
                                    {"ratio", nullptr},
                                    {"note", record.note}};
    if (record.baseline_figure.has_value()) {
      entry["baseline"] = {{"what", record.baseline_what}, {"figure", *record.baseline_figure}};
      entry["ratio"] = record.figure / *record.baseline_figure;
    }
    json.push_back(std::move(entry));
  }
  const std::string text = json.dump(2) + "\n";
  if (path == "-") {
    std::cout << text;
    return absl::OkStatus();
  }
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (!file) return absl::InvalidArgumentError(absl::StrCat("cannot write ", path));
  return absl::OkStatus();
}

absl::Status WriteRecords(const BenchFlags& flags, const std::string& machine,
                          const std::vector<BenchRecord>& records) {
  if (flags.out.empty()) return absl::OkStatus();
  return WriteRecords(flags.out, {.machine = machine, .commit = flags.commit}, records);
}

void PrintRecords(const std::vector<BenchRecord>& records) {
  for (const BenchRecord& record : records) {
    std::cout << absl::StrFormat("%-86s %10.3f %-5s (%.3f to %.3f)", record.what, record.figure,
                                 record.unit, record.spread.first, record.spread.second);
    if (record.baseline_figure.has_value()) {
      std::cout << absl::StrFormat("  %.2f times %.3f of %s",
                                   record.figure / *record.baseline_figure, *record.baseline_figure,
                                   record.baseline_what);
    }
    std::cout << (record.note.empty() ? "" : "  ") << record.note << '\n';
  }
}

int ExitCode(const std::string& program, const absl::Status& status) {
  if (status.ok()) return 0;
  std::cerr << program << ": " << status << '\n';
  return 1;
}

}  // namespace logprobd::testing
