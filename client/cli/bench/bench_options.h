#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/cli/bench/load_generator.h"
#include "client/cli/bench/schedule.h"
#include "client/cli/command.h"

namespace CLI {
class App;
}  // namespace CLI

namespace logprobd::client {

/// The options of `logprobctl bench`.
struct BenchOptions {
  CommonOptions common;

  /// Sizes, concurrency and rates of the loads; MakePlans combines them with `plan`.
  std::vector<RowMix> rows = {{.sizes = {{.rows = 256}}}};
  std::vector<int64_t> concurrency = {1};
  std::vector<double> request_rates;
  LoadPlan plan = {.warmup_requests = 10};  ///< Fields that all loads share.
  double stability_percent = 10;

  // Options of the request.
  std::string dtype = "bf16";
  std::vector<std::string> outputs = {"logprob", "entropy"};
  int32_t top_k = 0;
  std::string head;

  // Options of the connection.
  /// Options of the client but address, timeout, credentials and attempts.
  Client::Options client;
  int32_t retries = 0;
  int32_t gpu = 0;  ///< GPU that holds the rows of cuda-ipc.

  // Options of the report.
  std::string metrics_url;
  bool verify = false;
  std::vector<std::string> export_paths;
};

/// Adds bench's own options to its command. Invalid values are usage errors.
void AddBenchOptions(CLI::App& command, BenchOptions& options);

/// Returns a plan for every combination of sizes and loads, in the given order.
std::vector<LoadPlan> MakePlans(const BenchOptions& options);

}  // namespace logprobd::client
