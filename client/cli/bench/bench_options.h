#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/cli/bench/load_generator.h"
#include "client/cli/bench/row_mix.h"
#include "client/cli/command.h"

namespace CLI {
class App;
}  // namespace CLI

namespace logprobd::client {

/// What `logprobctl bench` was asked for.
struct BenchOptions {
  CommonOptions common;

  // The load. `plan` holds what all loads share; rows, concurrency and rates are filled in.
  std::vector<RowMix> rows = {{.sizes = {{.rows = 256}}}};
  std::vector<int64_t> concurrency = {1};
  std::vector<double> request_rates;
  LoadPlan plan = {.warmup_requests = 10};
  double stability_percent = 10;

  // The request.
  std::string dtype = "bf16";
  std::vector<std::string> outputs = {"logprob", "entropy"};
  int32_t top_k = 0;
  std::string head;

  // The way to the server.
  std::string method = "score";
  std::optional<TransportChoice> transport;  ///< Absent: as Client::Options says.
  int32_t gpu = 0;                           ///< Whose memory cuda-ipc sends rows from.
  int32_t channels = Client::Options().channels;
  int32_t retries = 0;
  absl::Duration busy_poll = absl::ZeroDuration();

  // What is reported.
  std::vector<double> percentiles;  ///< Beside the usual ones.
  std::string metrics_url;
  std::string verify_folder;
  int64_t verify_rows = 64;
  std::vector<std::string> export_paths;
};

/// Adds bench's own options to its command; bad values are usage errors.
void AddBenchOptions(CLI::App& command, BenchOptions& options);

/// How to connect for these options; address and timeout come from the common ones.
Client::Options BenchClientOptions(const BenchOptions& options);

/// Every combination of sizes and loads that was asked for, in order.
std::vector<LoadPlan> MakePlans(const BenchOptions& options);

}  // namespace logprobd::client
