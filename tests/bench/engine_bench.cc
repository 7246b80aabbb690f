// Measures the engine of a model's head without a server, which is the baseline of the service.
// e2e_bench.py keeps the head loaded in this program and requests one round at a time.
//
//   engine_bench --model DIR [--device auto|cpu|cuda] [--gpus 0,1] [--replicas 2]
//
// Reads commands from standard input and prints a line of JSON for each:
//   throughput ROWS SECONDS  scores batches of ROWS rows for about SECONDS, from host memory to
//       host memory, with as many batches in flight as the engine accepts. The result has
//       rows_per_second, batch_seconds (between batches of one replica) and batches.
//   latency ROWS COUNT  scores COUNT batches of ROWS rows, one at a time. The result has p50, p90,
//       p99 and mean from Start to the callback, and the mean of each stage, in seconds.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/base/errors.h"
#include "server/engine/engines.h"
#include "server/weights/head_weights.h"
#include "tests/bench/engine_load.h"
#include "tests/support/engine_case.h"
#include "tests/support/in_memory_head.h"

namespace logprobd::testing {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kDistinctElements = int64_t{1} << 22;

/// Returns standard normal bf16 rows (4 Mi elements, repeated) with random targets.
EngineCase MakeRows(const HeadInfo& head, int64_t num_rows) {
  EngineCase inputs;
  inputs.hidden_size = head.hidden_size;
  const int64_t elements = num_rows * head.hidden_size;
  const std::vector<std::byte> piece =
      EncodeFloats(NormalValues(std::min(elements, kDistinctElements), 1), Dtype::kBf16);
  inputs.hidden.reserve(static_cast<size_t>(elements * 2));
  while (inputs.hidden.size() < static_cast<size_t>(elements * 2)) {
    const size_t left = static_cast<size_t>(elements * 2) - inputs.hidden.size();
    inputs.hidden.insert(inputs.hidden.end(), piece.begin(),
                         piece.begin() + static_cast<std::ptrdiff_t>(std::min(left, piece.size())));
  }
  std::mt19937_64 random(1);
  for (int64_t row = 0; row < num_rows; ++row) {
    inputs.targets.push_back(
        static_cast<int32_t>(random() % static_cast<uint64_t>(head.vocab_size)));
    inputs.temperatures.push_back(1.0F);
  }
  return inputs;
}

/// Measures the engines of one head, one per replica, and keeps the batches of each requested size.
class EngineBench {
 public:
  static absl::StatusOr<std::unique_ptr<EngineBench>> Create(const std::string& model,
                                                             const EngineOptions& options) {
    auto bench = std::make_unique<EngineBench>();
    LOGPROBD_ASSIGN_OR_RETURN(bench->head_, OpenModelFolder(model, {}));
    const HeadWeights& weights = *bench->head_.weights;
    LOGPROBD_ASSIGN_OR_RETURN(const EnginePlan plan, PlanEngine(weights.info(), options));
    LOGPROBD_ASSIGN_OR_RETURN(bench->engines_, CreateEngines(weights, plan, options));
    bench->name_ = plan.engine;
    return bench;
  }

  Json Info() const {
    const HeadInfo& info = head_.weights->info();
    return {{"engine", name_},
            {"replicas", engines_.size()},
            {"hidden_size", info.hidden_size},
            {"vocab_size", info.vocab_size},
            {"batch_rows_max", engines_[0]->batch_rows_max()}};
  }

  absl::StatusOr<Json> Throughput(int64_t rows, double seconds) {
    LOGPROBD_ASSIGN_OR_RETURN(std::vector<EngineBatches> * batches, BatchesOf(rows));
    LOGPROBD_ASSIGN_OR_RETURN(const double probe_seconds, EngineSeconds(engines_, *batches, 2));
    const int count = std::max(4, static_cast<int>(seconds / (probe_seconds / 2)));
    LOGPROBD_ASSIGN_OR_RETURN(const double taken, EngineSeconds(engines_, *batches, count));
    const auto scored = static_cast<double>(rows) * count * static_cast<double>(engines_.size());
    return Json{{"rows_per_second", scored / taken},
                {"batch_seconds", taken / count},
                {"batches", count * static_cast<int>(engines_.size())}};
  }

  absl::StatusOr<Json> Latency(int64_t rows, int count) {
    LOGPROBD_ASSIGN_OR_RETURN(std::vector<EngineBatches> * batches, BatchesOf(rows));
    EngineBatches one;
    one.push_back(std::move((*batches)[0][0]));
    std::vector<double> taken;
    std::map<std::string, double> stages;
    absl::Status status;
    for (int i = -count / 10 - 1; i < count && status.ok(); ++i) {
      const absl::StatusOr<double> seconds = EngineSeconds(*engines_[0], one, 1);
      status = seconds.status();
      if (i < 0 || !status.ok()) continue;  // negative numbers are warm-up
      taken.push_back(*seconds);
      const ScoreBatch& batch = one[0]->batch;
      stages["h2d"] += batch.h2d_seconds / count;
      stages["kernel"] += batch.kernel_seconds / count;
      stages["combine"] += batch.combine_seconds / count;
      stages["d2h"] += batch.d2h_seconds / count;
    }
    (*batches)[0][0] = std::move(one[0]);
    LOGPROBD_RETURN_IF_ERROR(status);
    std::sort(taken.begin(), taken.end());
    double sum = 0;
    for (const double value : taken) sum += value;
    return Json{{"p50", taken[taken.size() / 2]},
                {"p90", taken[taken.size() * 9 / 10]},
                {"p99", taken[taken.size() * 99 / 100]},
                {"mean", sum / static_cast<double>(taken.size())},
                {"stages", stages}};
  }

 private:
  /// Returns the batches of each replica with `rows` rows, which are made once per size.
  absl::StatusOr<std::vector<EngineBatches>*> BatchesOf(int64_t rows) {
    if (rows < 1 || rows > engines_[0]->batch_rows_max()) {
      return absl::InvalidArgumentError(
          absl::StrCat("rows must be 1 to ", engines_[0]->batch_rows_max()));
    }
    std::vector<EngineBatches>& batches = batches_[rows];
    if (!batches.empty()) return &batches;
    const EngineCase inputs = MakeRows(head_.weights->info(), rows);
    for (const std::unique_ptr<ScoringEngine>& engine : engines_) {
      LOGPROBD_ASSIGN_OR_RETURN(batches.emplace_back(), MakeBatches(*engine, inputs));
    }
    return &batches;
  }

  ModelFolderHead head_;
  std::vector<std::unique_ptr<ScoringEngine>> engines_;
  std::string name_;
  std::map<int64_t, std::vector<EngineBatches>> batches_;  // by number of rows
};

absl::StatusOr<Json> Answer(EngineBench& bench, const std::string& line) {
  std::istringstream words(line);
  std::string command;
  int64_t rows = 0;
  double amount = 0;
  if (!(words >> command >> rows >> amount) || amount <= 0) {
    return absl::InvalidArgumentError("expected: throughput ROWS SECONDS or latency ROWS COUNT");
  }
  if (command == "throughput") return bench.Throughput(rows, amount);
  if (command == "latency") return bench.Latency(rows, static_cast<int>(amount));
  return absl::InvalidArgumentError(absl::StrCat("unknown command: ", command));
}

int Serve(const std::string& model, const EngineOptions& options) {
  absl::StatusOr<std::unique_ptr<EngineBench>> bench = EngineBench::Create(model, options);
  if (!bench.ok()) {
    std::cerr << "engine_bench: " << bench.status() << '\n';
    return 1;
  }
  std::cout << (*bench)->Info().dump() << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    absl::StatusOr<Json> answer = Answer(**bench, line);
    if (!answer.ok()) answer = Json{{"error", answer.status().ToString()}};
    std::cout << answer->dump() << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace logprobd::testing

int main(int argc, char** argv) {
  // Abseil's deadlock detection takes a process-wide lock whenever a mutex is locked; see
  // server/main.cc.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  CLI::App app(
      "Measures the engine of a head without a server. Reads commands from standard input.");
  std::string model;
  logprobd::EngineOptions options;
  app.add_option("--model", model, "Hugging Face folder or .safetensors file")->required();
  app.add_option("--device", options.device, "Device of the engine")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, logprobd::Device>{{"auto", logprobd::Device::kAuto},
                                                  {"cpu", logprobd::Device::kCpu},
                                                  {"cuda", logprobd::Device::kCuda}}));
  app.add_option("--gpus", options.gpus, "CUDA devices, for example 0,1")->delimiter(',');
  app.add_option("--replicas", options.replicas,
                 "Number of whole heads; with 0 the number is chosen as in the server");
  app.add_option("--batch-rows", options.batch_rows_max, "Maximum number of rows in a batch")
      ->capture_default_str();
  app.add_option("--cpu-threads", options.cpu_threads,
                 "Threads of the CPU engine; 0 means all cores");
  CLI11_PARSE(app, argc, argv);
  return logprobd::testing::Serve(model, options);
}
