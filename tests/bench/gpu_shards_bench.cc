// Measures one head on the GPUs of a host: on one GPU, in shards and as replicas. --part speed
// measures throughput from hidden states in pinned host memory to scores in host memory, with two
// batches in flight and the arrangements in random order in each round. --part load measures how
// long loading from the page cache takes, and compares the memory in use with the plan.
//
//   gpu_shards_bench [--out FILE] [--commit ID] [--rounds 7] [--part speed|load]

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/errors.h"
#include "server/engine/cuda_engine.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/engines.h"
#include "tests/bench/bench_record.h"
#include "tests/bench/engine_load.h"
#include "tests/bench/gpu_bench.h"
#include "tests/gpu/large_head.h"

namespace logprobd::testing {
namespace {

/// Approximate duration of each timed part. An untimed warm-up of a third of it comes before.
constexpr double kPartSeconds = 0.4;

struct Flags {
  BenchFlags common = {.rounds = 7};
  std::string part = "speed";
};

struct Shape {
  int64_t hidden_size;
  int64_t vocab_size;
};

/// Number of replicas and shards, and how the shards exchange sums.
struct Arrangement {
  std::string name;
  int32_t replicas;
  int32_t shards;
  Exchange exchange = Exchange::kAuto;
};

/// The engines of an arrangement, each with two batches in flight.
struct Loaded {
  std::vector<std::unique_ptr<ScoringEngine>> engines;
  std::vector<EngineBatches> batches;  ///< Batches of the current number of rows, per engine.
  int count = 0;                       ///< Number of batches in a timed part.
};

int NumGpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

/// Returns the arrangements that the GPUs of this machine allow.
std::vector<Arrangement> Arrangements() {
  std::vector<Arrangement> all = {{"1 GPU", 1, 1}};
  for (int32_t gpus = 2; gpus <= NumGpus(); gpus *= 2) {
    all.push_back({absl::StrCat(gpus, " shards"), 1, gpus, Exchange::kPeer});
    all.push_back({absl::StrCat(gpus, " shards, NCCL"), 1, gpus, Exchange::kNccl});
    all.push_back({absl::StrCat(gpus, " replicas"), gpus, 1});
  }
  return all;
}

absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateOn(const HeadWeights& head,
                                                                     const Arrangement& how,
                                                                     EnginePlan* plan = nullptr) {
  EngineOptions options;
  for (int32_t gpu = 0; gpu < how.replicas * how.shards; ++gpu) options.gpus.push_back(gpu);
  options.replicas = how.replicas;
  options.shards = how.shards;
  options.exchange = how.exchange;
  LOGPROBD_ASSIGN_OR_RETURN(EnginePlan made, PlanCudaEngine(head.info(), options, ""));
  if (plan != nullptr) *plan = made;
  return CreateCudaEngines(head, made, options);
}

/// Returns the milliseconds until `count` batches per engine are scored, divided by `count`.
absl::StatusOr<double> Milliseconds(Loaded& loaded, int count) {
  LOGPROBD_ASSIGN_OR_RETURN(const double seconds,
                            EngineSeconds(loaded.engines, loaded.batches, count));
  return seconds * 1e3 / count;
}

/// Returns text for a note that states the target for the throughput divided by that of one GPU, or
/// an empty string if there is no target.
std::string TargetText(const Arrangement& how, int64_t rows) {
  std::map<int32_t, double> by_gpus;
  if (how.replicas > 1) {
    by_gpus = {{2, 1.95}, {4, 3.9}};
  } else if (how.exchange != Exchange::kNccl && rows == 64) {
    by_gpus = {{2, 1.6}, {4, 2.4}};
  } else if (how.exchange != Exchange::kNccl && rows == 8'192) {
    by_gpus = {{2, 1.9}, {4, 3.6}, {8, 6.5}};
  }
  const auto found = by_gpus.find(how.replicas * how.shards);
  return found == by_gpus.end() ? "" : absl::StrCat("; target at least ", found->second);
}

/// Describes the stages of a finished batch. `interval_ms` is the time between two batches.
std::string StagesText(const ScoreBatch& batch, double interval_ms) {
  const double kernel_ms = batch.kernel_seconds * 1e3;
  return absl::StrFormat(
      "ms of a batch: copy in %.3f (from other GPUs %.3f), kernels %.3f, combine and exchange "
      "%.3f, copy out %.3f; %.1f %% of the time between batches is not kernel time",
      batch.h2d_seconds * 1e3, batch.gather_seconds * 1e3, kernel_ms, batch.combine_seconds * 1e3,
      batch.d2h_seconds * 1e3, 100.0 * (interval_ms - kernel_ms) / interval_ms);
}

absl::Status MeasureSpeed(const Flags& flags, const Shape& shape,
                          std::vector<BenchRecord>& records) {
  const LargeHead head(shape.vocab_size, shape.hidden_size, 3.0);
  const std::vector<Arrangement> arrangements = Arrangements();
  std::vector<Loaded> loaded(arrangements.size());
  for (size_t i = 0; i < arrangements.size(); ++i) {
    LOGPROBD_ASSIGN_OR_RETURN(loaded[i].engines, CreateOn(head, arrangements[i]));
  }
  for (const int64_t rows : {64, 512, 8'192}) {
    const EngineCase inputs = MakeLargeCase(head, rows, 1);
    std::vector<std::vector<double>> times(arrangements.size());
    for (Loaded& all : loaded) {
      all.batches.clear();
      all.batches.resize(all.engines.size());
      for (size_t i = 0; i < all.engines.size(); ++i) {
        LOGPROBD_ASSIGN_OR_RETURN(all.batches[i], MakeBatches(*all.engines[i], inputs));
      }
      LOGPROBD_ASSIGN_OR_RETURN(const double first_ms, Milliseconds(all, 8));
      all.count = std::max(8, static_cast<int>(kPartSeconds * 1e3 / first_ms));
    }
    std::vector<size_t> order(arrangements.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::mt19937 random(1);
    for (int round = 0; round < flags.common.rounds; ++round) {
      std::shuffle(order.begin(), order.end(), random);
      for (const size_t i : order) {
        LOGPROBD_RETURN_IF_ERROR(Milliseconds(loaded[i], loaded[i].count / 3 + 1).status());
        LOGPROBD_ASSIGN_OR_RETURN(const double milliseconds,
                                  Milliseconds(loaded[i], loaded[i].count));
        times[i].push_back(milliseconds);
      }
    }
    const double single_ms = Median(times[0]);
    for (size_t i = 0; i < arrangements.size(); ++i) {
      const auto per_round = static_cast<double>(rows * arrangements[i].replicas);
      std::vector<double> rates;
      for (const double milliseconds : times[i]) rates.push_back(per_round / milliseconds);
      BenchRecord record = RecordOf(
          absl::StrCat("GPU engine, ", arrangements[i].name, ", H=", shape.hidden_size,
                       ", V=", shape.vocab_size, ", batches of ", rows, " rows, 2 in flight"),
          "thousand rows/s", rates);
      record.note = absl::StrCat("logprob and entropy, host to host; ",
                                 StagesText(loaded[i].batches[0][0]->batch, Median(times[i])));
      if (i > 0) {
        record.baseline_what = "1 GPU";
        record.baseline_figure = static_cast<double>(rows) / single_ms;
        record.note += TargetText(arrangements[i], rows);
      }
      std::printf("H %5ld T %5ld %-16s %9.3f ms %9.1f k rows/s  x%.3f  %s\n",
                  static_cast<long>(shape.hidden_size), static_cast<long>(rows),
                  arrangements[i].name.c_str(), Median(times[i]), Median(rates),
                  Median(rates) / (static_cast<double>(rows) / single_ms),
                  record.note.c_str() + 38);
      std::fflush(stdout);
      records.push_back(std::move(record));
    }
  }
  return absl::OkStatus();
}

/// Writes a model folder whose head has `shape` and random bf16 elements. Its bytes are then in the
/// page cache.
absl::Status WriteModel(const std::string& folder, const Shape& shape) {
  std::filesystem::create_directories(folder);
  std::ofstream config(absl::StrCat(folder, "/config.json"));
  config << "{\"model_type\": \"llama\", \"vocab_size\": " << shape.vocab_size
         << ", \"hidden_size\": " << shape.hidden_size << ", \"tie_word_embeddings\": false}";
  config.close();
  const int64_t bytes = shape.vocab_size * shape.hidden_size * 2;
  std::string header =
      absl::StrCat("{\"lm_head.weight\":{\"dtype\":\"BF16\",\"shape\":[", shape.vocab_size, ",",
                   shape.hidden_size, "],\"data_offsets\":[0,", bytes, "]}}");
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::ofstream file(absl::StrCat(folder, "/model.safetensors"), std::ios::binary);
  const auto header_bytes = static_cast<uint64_t>(header.size());
  file.write(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes));
  file << header;
  std::vector<uint16_t> piece(size_t{8} << 20);
  std::mt19937 random(1);
  for (uint16_t& value : piece) value = static_cast<uint16_t>(0x3C00 + random() % 0x100);
  for (int64_t done = 0; done < bytes;) {
    const int64_t count = std::min<int64_t>(static_cast<int64_t>(piece.size()) * 2, bytes - done);
    file.write(reinterpret_cast<const char*>(piece.data()), count);
    done += count;
  }
  file.close();
  return file.good() ? absl::OkStatus() : absl::InternalError("the model cannot be written");
}

/// Returns the free bytes of each GPU.
absl::StatusOr<std::vector<int64_t>> FreeBytes() {
  std::vector<int64_t> bytes;
  for (int gpu = 0; gpu < NumGpus(); ++gpu) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(gpu));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes));
    bytes.push_back(static_cast<int64_t>(free_bytes));
  }
  return bytes;
}

absl::Status MeasureLoad(const Flags& flags, std::vector<BenchRecord>& records) {
  const Shape shape = {.hidden_size = 8'192, .vocab_size = 262'144};
  const std::string folder = absl::StrCat(std::filesystem::temp_directory_path().string(),
                                          "/logprobd_shards_bench_", getpid());
  LOGPROBD_RETURN_IF_ERROR(WriteModel(folder, shape));
  absl::StatusOr<ModelFolderHead> model = OpenModelFolder(folder, {});
  const double gigabytes = static_cast<double>(shape.vocab_size * shape.hidden_size * 2) * 1e-9;
  absl::Status status = model.status();
  for (const Arrangement& how : Arrangements()) {
    std::vector<double> seconds;
    std::vector<double> rates;
    int64_t difference_max = 0;
    for (int round = 0; round <= flags.common.rounds && status.ok(); ++round) {
      status = [&]() -> absl::Status {
        EngineOptions options;
        EnginePlan plan;
        LOGPROBD_ASSIGN_OR_RETURN(const std::vector<int64_t> before, FreeBytes());
        const absl::Time begin = absl::Now();
        LOGPROBD_ASSIGN_OR_RETURN(const auto engines, CreateOn(*model->weights, how, &plan));
        const double took = absl::ToDoubleSeconds(absl::Now() - begin);
        LOGPROBD_ASSIGN_OR_RETURN(const std::vector<int64_t> after, FreeBytes());
        if (round == 0) return absl::OkStatus();  // the first round loads contexts and kernels
        seconds.push_back(took);
        rates.push_back(gigabytes * how.replicas / took);
        for (size_t gpu = 0; gpu < before.size(); ++gpu) {
          int64_t planned = 0;
          for (const MemoryUse& use : plan.memory) {
            if (use.place == absl::StrCat("gpu", gpu)) planned += use.bytes;
          }
          const int64_t more = before[gpu] - after[gpu] - planned;
          if (std::abs(more) > std::abs(difference_max)) difference_max = more;
        }
        return absl::OkStatus();
      }();
    }
    LOGPROBD_RETURN_IF_ERROR(status);
    std::printf("load %-16s %6.2f s, %6.2f GB/s; memory %+.1f MiB more than planned\n",
                how.name.c_str(), Median(seconds), Median(rates),
                static_cast<double>(difference_max) / (1 << 20));
    std::fflush(stdout);
    BenchRecord record =
        RecordOf(absl::StrCat("GPU engine, ", how.name, ": load of a head of ",
                              absl::StrFormat("%.1f", gigabytes), " GB from the page cache"),
                 "s", seconds);
    record.note = absl::StrFormat(
        "time until ready to score, with connection and warm-up but without creation of the CUDA "
        "contexts; %.1f GB/s; memory of each GPU within %.1f MiB of the plan",
        Median(rates), static_cast<double>(std::abs(difference_max)) / (1 << 20));
    if (how.replicas == 1) record.note += "; target at most 3";
    records.push_back(std::move(record));
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return status;
}

absl::Status Run(const Flags& flags) {
  std::vector<BenchRecord> records;
  if (flags.part == "load") {
    LOGPROBD_RETURN_IF_ERROR(MeasureLoad(flags, records));
  } else {
    for (const Shape& shape : {Shape{4'096, 151'936}, Shape{8'192, 128'256}}) {
      LOGPROBD_RETURN_IF_ERROR(MeasureSpeed(flags, shape, records));
    }
  }
  return WriteRecords(flags.common, absl::StrCat(NumGpus(), " x ", GpuMachineName()), records);
}

}  // namespace
}  // namespace logprobd::testing

int main(int argc, char** argv) {
  logprobd::testing::Flags flags;
  CLI::App app("Measures one head on the GPUs of a host, in shards and as replicas.");
  logprobd::testing::AddBenchFlags(app, flags.common);
  app.add_option("--part", flags.part, "Part to measure: throughput, or loading and memory")
      ->check(CLI::IsMember({"speed", "load"}))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return logprobd::testing::ExitCode("gpu_shards_bench", logprobd::testing::Run(flags));
}
