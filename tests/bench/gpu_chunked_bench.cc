// Measures the chunked path and the cuBLASLt GEMM that writes bf16 logits with events, in one
// process and on hidden rows in device memory. Each round runs them in random order. Then measures
// the engine from host memory to host memory on both paths.
//
//   gpu_chunked_bench [--out FILE] [--commit ID] [--rounds 9] [--rows 1024,4096,8192,16384]
//                     [--shapes BLOCK_ROWS:LOGITS_MIB:ALGORITHM,...]
//
// Without --shapes the program measures the block shape of the server. With --shapes it prints one
// line per shape and number of rows, does not measure the engine, and writes no JSON.

#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "kernels/common/tile.h"
#include "server/base/errors.h"
#include "server/engine/cuda_engine.h"
#include "server/engine/cuda_head.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/cuda_scorer.h"
#include "server/engine/workspace_plan.h"
#include "tests/bench/bench_record.h"
#include "tests/bench/engine_load.h"
#include "tests/bench/gpu_bench.h"
#include "tests/bench/storing_gemm.h"
#include "tests/gpu/large_head.h"

namespace logprobd::testing {
namespace {

constexpr int64_t kVocabSize = 151'936;
constexpr int64_t kHiddenSize = 4'096;
/// Each timed part runs for about this time, after untimed runs for about a third of it.
constexpr double kPartSeconds = 0.06;

struct Flags {
  BenchFlags common = {.rounds = 9};
  std::vector<int64_t> rows = {1'024, 4'096, 8'192, 16'384};
  std::vector<std::string> shapes;
};

/// The head, hidden rows, targets, scales and score buffers of the measurement.
struct Fixture {
  std::shared_ptr<const CudaHead> head;
  DeviceBuffer hidden;
  DeviceBuffer targets;
  DeviceBuffer log2_scales;
  DeviceBuffer logprob;
  DeviceBuffer entropy;
  DeviceBuffer nonfinite;
};

absl::StatusOr<DeviceBuffer> ToDevice(const void* values, int64_t bytes, int64_t room_bytes) {
  LOGPROBD_ASSIGN_OR_RETURN(DeviceBuffer buffer, AllocateDevice(room_bytes, "benchmark data"));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(buffer.get(), values, static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
  return buffer;
}

absl::StatusOr<Fixture> MakeFixture(int64_t rows_max) {
  const LargeHead head(kVocabSize, kHiddenSize, 3.0);
  const WorkspacePlan plan = PlanWorkspace({.vocab_size = kVocabSize, .hidden_size = kHiddenSize});
  Fixture fixture;
  LoadMeter meter(0, {});
  LOGPROBD_ASSIGN_OR_RETURN(CudaHead device_head, LoadCudaHead(head, plan, meter));
  fixture.head = std::make_shared<const CudaHead>(std::move(device_head));
  const EngineCase inputs = MakeLargeCase(head, rows_max, 1);
  const std::vector<float> scales(static_cast<size_t>(rows_max), kernels::Log2Scale(1.0F));
  const auto hidden_bytes = static_cast<int64_t>(inputs.hidden.size());
  const int64_t padding = kRowGranularity * kHiddenSize * 2;
  LOGPROBD_ASSIGN_OR_RETURN(fixture.hidden,
                            ToDevice(inputs.hidden.data(), hidden_bytes, hidden_bytes + padding));
  LOGPROBD_ASSIGN_OR_RETURN(fixture.targets,
                            ToDevice(inputs.targets.data(), rows_max * 4, rows_max * 4));
  LOGPROBD_ASSIGN_OR_RETURN(fixture.log2_scales,
                            ToDevice(scales.data(), rows_max * 4, rows_max * 4));
  LOGPROBD_ASSIGN_OR_RETURN(fixture.logprob, AllocateDevice(rows_max * 4, "benchmark data"));
  LOGPROBD_ASSIGN_OR_RETURN(fixture.entropy, AllocateDevice(rows_max * 4, "benchmark data"));
  LOGPROBD_ASSIGN_OR_RETURN(fixture.nonfinite, AllocateDevice(rows_max, "benchmark data"));
  return fixture;
}

/// Scores `rows` rows with the chunked path, block by block as in the engine.
absl::Status ScoreRows(CudaScorer& scorer, const Fixture& fixture, int64_t rows,
                       cudaStream_t stream) {
  const int64_t block_rows = scorer.plan().BlockRows(kernels::Dtype::kBf16);
  for (int64_t row = 0; row < rows; row += block_rows) {
    CudaBlock block;
    block.hidden = fixture.hidden.get() + row * kHiddenSize * 2;
    block.num_rows = std::min(block_rows, rows - row);
    block.targets = reinterpret_cast<const int32_t*>(fixture.targets.get()) + row;
    block.log2_scales = reinterpret_cast<const float*>(fixture.log2_scales.get()) + row;
    block.scores.logprob = reinterpret_cast<float*>(fixture.logprob.get()) + row;
    block.scores.entropy = reinterpret_cast<float*>(fixture.entropy.get()) + row;
    block.scores.nonfinite = reinterpret_cast<uint8_t*>(fixture.nonfinite.get()) + row;
    LOGPROBD_RETURN_IF_ERROR(scorer.EnqueuePartials(block, stream));
    LOGPROBD_RETURN_IF_ERROR(scorer.EnqueueScores(block, stream));
  }
  return absl::OkStatus();
}

/// Returns the milliseconds of every round for each work, by name.
absl::StatusOr<std::map<std::string, std::vector<double>>> MeasureRounds(
    const std::map<std::string, Work>& works, int rounds, Timer& timer) {
  std::map<std::string, int> repeats;
  for (const auto& [name, work] : works) {
    LOGPROBD_RETURN_IF_ERROR(timer.Milliseconds(work, 1).status());
    LOGPROBD_ASSIGN_OR_RETURN(const double milliseconds, timer.Milliseconds(work, 2));
    repeats[name] = std::max(1, static_cast<int>(kPartSeconds * 1e3 / milliseconds));
  }
  std::mt19937 random(1);
  std::map<std::string, std::vector<double>> times;
  std::vector<std::string> order;
  for (const auto& [name, work] : works) order.push_back(name);
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (const std::string& name : order) {
      const Work& work = works.at(name);
      LOGPROBD_RETURN_IF_ERROR(timer.Milliseconds(work, std::max(1, repeats[name] / 3)).status());
      LOGPROBD_ASSIGN_OR_RETURN(const double milliseconds, timer.Milliseconds(work, repeats[name]));
      times[name].push_back(milliseconds);
    }
  }
  return times;
}

/// Makes a record of `ours` with the GEMM as baseline, if there is one.
BenchRecord Record(const std::string& what, const std::vector<double>& ours,
                   const std::vector<double>* baseline, const std::string& note) {
  BenchRecord record = RecordOf(what, "ms", ours);
  record.note = note;
  if (baseline != nullptr) {
    record.baseline_what = "cuBLASLt GEMM that writes bf16 logits";
    record.baseline_figure = Median(*baseline);
  }
  return record;
}

/// Measures the engine from pinned host memory to scores in host memory. Small batches run one at a
/// time (latency), and large batches also run with two in flight (throughput).
absl::Status MeasureEngine(const Flags& flags, GpuKernel kernel,
                           std::vector<BenchRecord>& records) {
  const LargeHead head(kVocabSize, kHiddenSize, 3.0);
  EngineOptions options;
  options.kernel = kernel;
  options.gpus = {0};
  LOGPROBD_ASSIGN_OR_RETURN(const EnginePlan plan, PlanCudaEngine(head.info(), options, ""));
  LOGPROBD_ASSIGN_OR_RETURN(const auto engines, CreateCudaEngines(head, plan, options));
  ScoringEngine* const engine = engines.front().get();
  struct Load {
    int64_t rows;
    size_t in_flight;
    int count;
  };
  for (const Load load : {Load{1, 1, 200}, Load{64, 1, 200}, Load{256, 1, 100}, Load{8'192, 1, 10},
                          Load{8'192, 2, 20}}) {
    EngineBatches batches;
    for (size_t i = 0; i < load.in_flight; ++i) {
      LOGPROBD_ASSIGN_OR_RETURN(auto batch,
                                MakeBatch(*engine, MakeLargeCase(head, load.rows, i + 1)));
      batches.push_back(std::move(batch));
    }
    LOGPROBD_RETURN_IF_ERROR(EngineSeconds(*engine, batches, load.count).status());
    std::vector<double> times;
    for (int round = 0; round < flags.common.rounds; ++round) {
      LOGPROBD_ASSIGN_OR_RETURN(const double seconds, EngineSeconds(*engine, batches, load.count));
      times.push_back(seconds * 1e3 / load.count);
    }
    const ScoreBatch& last = batches[0]->batch;
    const std::string stages =
        absl::StrFormat("ms of one batch: copy in %.3f, kernels %.3f, combine %.3f, copy out %.3f",
                        last.h2d_seconds * 1e3, last.kernel_seconds * 1e3,
                        last.combine_seconds * 1e3, last.d2h_seconds * 1e3);
    std::printf("%s, %5ld rows, %zu in flight: %8.3f ms per batch; %s\n", plan.engine.c_str(),
                static_cast<long>(load.rows), load.in_flight, Median(times), stages.c_str());
    records.push_back(Record(
        absl::StrCat("GPU engine ", plan.engine, ", host to host, H=4096, V=151936, batches of ",
                     load.rows, " rows, ", load.in_flight, " in flight"),
        times, nullptr,
        absl::StrCat("logprob and entropy; hidden rows in pinned memory; ", stages)));
  }
  return absl::OkStatus();
}

absl::Status MeasureDefault(const Flags& flags, const Fixture& fixture, Timer& timer) {
  const WorkspacePlan plan = PlanWorkspace({.vocab_size = kVocabSize, .hidden_size = kHiddenSize});
  LOGPROBD_ASSIGN_OR_RETURN(const auto scorer, CudaScorer::Create(plan, fixture.head));
  std::vector<BenchRecord> records;
  std::printf("workspace %.1f MiB, %s\n%8s %12s %12s %8s\n",
              static_cast<double>(plan.workspace_bytes) / (1 << 20), scorer->algorithm().c_str(),
              "rows", "chunked ms", "GEMM ms", "ratio");
  for (const int64_t rows : flags.rows) {
    LOGPROBD_ASSIGN_OR_RETURN(
        const auto gemm,
        StoringGemm::Create({.rows = rows, .columns = kVocabSize, .depth = kHiddenSize},
                            fixture.head->weight.get(), fixture.hidden.get(), timer));
    LOGPROBD_ASSIGN_OR_RETURN(
        const auto times,
        MeasureRounds(
            {{"chunked", [&](cudaStream_t s) { return ScoreRows(*scorer, fixture, rows, s); }},
             {"gemm", [&](cudaStream_t s) { return gemm->Run(s); }}},
            flags.common.rounds, timer));
    const std::vector<double>& ours = times.at("chunked");
    const std::vector<double>& baseline = times.at("gemm");
    std::printf("%8ld %12.3f %12.3f %8.3f\n", static_cast<long>(rows), Median(ours),
                Median(baseline), Median(ours) / Median(baseline));
    records.push_back(Record(
        absl::StrCat("GPU chunked, logprob and entropy, H=4096, V=151936, T=", rows), ours,
        &baseline,
        absl::StrCat("hidden rows on the device; workspace ", plan.workspace_bytes >> 20, " MiB")));
  }
  LOGPROBD_RETURN_IF_ERROR(MeasureEngine(flags, GpuKernel::kChunked, records));
  LOGPROBD_RETURN_IF_ERROR(MeasureEngine(flags, GpuKernel::kAuto, records));
  return WriteRecords(flags.common, GpuMachineName(), records);
}

absl::Status MeasureShape(const Flags& flags, const std::string& shape, const Fixture& fixture,
                          Timer& timer) {
  const std::vector<std::string> parts = absl::StrSplit(shape, ':');
  if (parts.size() != 3) return absl::InvalidArgumentError(shape);
  const WorkspacePlan plan = PlanWorkspace({.vocab_size = kVocabSize,
                                            .hidden_size = kHiddenSize,
                                            .batch_rows_max = 16'384,
                                            .workspace_bytes_max = int64_t{8} << 30,
                                            .block_rows_max = std::atoll(parts[0].c_str()),
                                            .logits_bytes = std::atoll(parts[1].c_str()) << 20});
  auto scorer = CudaScorer::Create(plan, fixture.head, std::atoi(parts[2].c_str()));
  if (!scorer.ok()) {
    std::printf("%14s %s\n", shape.c_str(), std::string(scorer.status().message()).c_str());
    return absl::OkStatus();
  }
  for (const int64_t rows : flags.rows) {
    LOGPROBD_ASSIGN_OR_RETURN(
        const auto gemm,
        StoringGemm::Create({.rows = rows, .columns = kVocabSize, .depth = kHiddenSize},
                            fixture.head->weight.get(), fixture.hidden.get(), timer));
    LOGPROBD_ASSIGN_OR_RETURN(
        const auto times,
        MeasureRounds(
            {{"chunked", [&](cudaStream_t s) { return ScoreRows(**scorer, fixture, rows, s); }},
             {"gemm", [&](cudaStream_t s) { return gemm->Run(s); }}},
            flags.common.rounds, timer));
    const int64_t block_rows = std::min(rows, plan.BlockRows(kernels::Dtype::kBf16));
    std::printf("%14s rows %6ld tiles %4ld chunked %8.3f gemm %8.3f ratio %.3f  %s\n",
                shape.c_str(), static_cast<long>(rows),
                static_cast<long>(plan.ChunkTiles(kernels::Dtype::kBf16, block_rows)),
                Median(times.at("chunked")), Median(times.at("gemm")),
                Median(times.at("chunked")) / Median(times.at("gemm")),
                (*scorer)->algorithm().c_str());
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

absl::Status Run(const Flags& flags) {
  LOGPROBD_ASSIGN_OR_RETURN(Timer timer, Timer::Create());
  LOGPROBD_ASSIGN_OR_RETURN(const Fixture fixture,
                            MakeFixture(*std::max_element(flags.rows.begin(), flags.rows.end())));
  for (const std::string& shape : flags.shapes) {
    LOGPROBD_RETURN_IF_ERROR(MeasureShape(flags, shape, fixture, timer));
  }
  return flags.shapes.empty() ? MeasureDefault(flags, fixture, timer) : absl::OkStatus();
}

}  // namespace
}  // namespace logprobd::testing

int main(int argc, char** argv) {
  logprobd::testing::Flags flags;
  CLI::App app("Compares the chunked path with the GEMM, and measures the engine on both paths.");
  logprobd::testing::AddBenchFlags(app, flags.common);
  app.add_option("--rows", flags.rows, "Numbers of rows in a batch")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--shapes", flags.shapes, "Block shapes to measure instead of that of the server")
      ->type_name("BLOCK_ROWS:LOGITS_MIB:ALGORITHM")
      ->delimiter(',');
  CLI11_PARSE(app, argc, argv);
  return logprobd::testing::ExitCode("gpu_chunked_bench", logprobd::testing::Run(flags));
}
