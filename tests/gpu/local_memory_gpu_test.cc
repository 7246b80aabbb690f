// Rows in memory of clients (GPU memory of other processes, and pinned memory shared with them) get
// scores that are bit-identical to those of staged rows. No handle, valid or not, keeps the next
// batch from being scored.

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "server/engine/cuda_client_memory.h"
#include "tests/gpu/gpu_engine.h"
#include "tests/gpu/memory_exporter.h"
#include "tests/support/engine_case.h"
#include "tests/support/in_memory_head.h"

namespace logprobd::testing {
namespace {

constexpr int64_t kRows = 300;
constexpr int64_t kAllocationBytes = int64_t{8} << 20;
constexpr int64_t kOffset = 4'096 + 16;

/// The status and the scores of a batch.
struct Outcome {
  absl::Status status;
  std::vector<float> logprob;
  std::vector<float> entropy;
};

/// Scores `inputs`. Its rows lie in `runs`, or in `staging` if there are no runs.
Outcome Score(ScoringEngine& engine, const EngineCase& inputs, const std::byte* staging,
              const std::vector<HiddenRun>& runs) {
  const auto rows = static_cast<size_t>(inputs.num_rows());
  Outcome outcome;
  outcome.logprob.resize(rows);
  outcome.entropy.resize(rows);
  std::vector<uint8_t> nonfinite(rows);
  ScoreBatch batch;
  batch.dtype = inputs.dtype;
  batch.num_rows = inputs.num_rows();
  batch.hidden = staging;
  batch.runs = runs;
  batch.targets = inputs.targets;
  batch.temperatures = inputs.temperatures;
  batch.outputs = OutputSet().With(Output::kLogprob).With(Output::kEntropy);
  batch.logprob = absl::MakeSpan(outcome.logprob);
  batch.entropy = absl::MakeSpan(outcome.entropy);
  batch.nonfinite = absl::MakeSpan(nonfinite);
  absl::Notification done;
  engine.Start(batch, [&](absl::Status ended) {
    outcome.status = std::move(ended);
    done.Notify();
  });
  done.WaitForNotification();
  return outcome;
}

/// A shape of the engine and its head, with its name in the tests.
struct Shape {
  std::string name;
  int64_t hidden_size;  ///< Rows of some sizes are padded on the GPU.
  int32_t shards;
};

class LocalMemoryGpuTest : public ::testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    if (!NoGpuReason().empty()) GTEST_SKIP() << NoGpuReason();
    head_ = MakeRandomHead({.vocab_size = 1'000, .hidden_size = GetParam().hidden_size});
    EngineOptions options;
    options.batch_rows_max = 512;
    auto engine = CreateGpuEngine(*head_, options, GetParam().shards);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    inputs_ = MakeRandomCase(*head_, kRows);
    row_bytes_ = GetParam().hidden_size * 2;
    auto staging = engine_->AllocateStaging(static_cast<int64_t>(inputs_.hidden.size()));
    ASSERT_TRUE(staging.ok()) << staging.status();
    staging_ = *std::move(staging);
    staged_ = ScoreStaged();
    ASSERT_TRUE(staged_.status.ok()) << staged_.status;
  }

  Outcome ScoreStaged() {
    std::memcpy(staging_->data(), inputs_.hidden.data(), inputs_.hidden.size());
    return Score(*engine_, inputs_, staging_->data(), {});
  }

  void ExpectStagedBits(const Outcome& outcome) const {
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(std::memcmp(outcome.logprob.data(), staged_.logprob.data(), kRows * 4), 0);
    EXPECT_EQ(std::memcmp(outcome.entropy.data(), staged_.entropy.data(), kRows * 4), 0);
  }

  /// Expects that CUDA and the engine still work.
  void ExpectGoodContext() {
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_TRUE(engine_->healthy());
    ExpectStagedBits(ScoreStaged());
  }

  std::unique_ptr<DeviceMemory> MakeMemory(CudaIpcOptions options = {}) {
    options.gpus = {0};
    auto memory = CreateCudaIpcMemory(std::move(options));
    EXPECT_TRUE(memory.ok()) << memory.status();
    return memory.ok() ? *std::move(memory) : nullptr;
  }

  /// Copies the rows to GPU memory of another process and returns their slice.
  std::optional<DeviceSlice> Export(MemoryExporter& exporter, int32_t gpu = 0) const {
    return exporter.Export(gpu, kAllocationBytes, kOffset, inputs_.hidden);
  }

  Outcome ScoreSlice(DeviceMemory& memory, const DeviceSlice& slice) {
    absl::StatusOr<HiddenPayload> payload = memory.Open(slice);
    if (!payload.ok()) return {.status = payload.status(), .logprob = {}, .entropy = {}};
    EXPECT_EQ(payload->place, PayloadPlace::kDevice);
    return Score(*engine_, inputs_, staging_->data(),
                 {{.data = payload->pieces[0].data(), .num_rows = kRows, .gpu = payload->gpu}});
  }

  std::unique_ptr<InMemoryHead> head_;
  std::unique_ptr<ScoringEngine> engine_;
  EngineCase inputs_;
  int64_t row_bytes_ = 0;
  std::unique_ptr<StagingBuffer> staging_;
  Outcome staged_;
};

TEST_P(LocalMemoryGpuTest, RowsInGpuMemoryOfAnotherProcessHaveTheBitsOfStagedRows) {
  MemoryExporter exporter;
  const auto slice = Export(exporter);
  ASSERT_TRUE(slice.has_value()) << "this host does not share GPU memory";
  const auto memory = MakeMemory();

  ExpectStagedBits(ScoreSlice(*memory, *slice));
  ExpectStagedBits(ScoreSlice(*memory, *slice));

  EXPECT_EQ(memory->num_mappings(), 1);
  ExpectGoodContext();
}

TEST_P(LocalMemoryGpuTest, CopiesAPartOfASliceToTheHost) {
  MemoryExporter exporter;
  const auto slice = Export(exporter);
  ASSERT_TRUE(slice.has_value());
  const auto memory = MakeMemory();
  const absl::StatusOr<HiddenPayload> payload = memory->Open(*slice);
  ASSERT_TRUE(payload.ok()) << payload.status();
  const auto expected =
      absl::MakeConstSpan(inputs_.hidden).subspan(static_cast<size_t>(row_bytes_));
  std::vector<std::byte> copied(expected.size());

  ASSERT_TRUE(memory->CopyToHost(*payload, row_bytes_, absl::MakeSpan(copied)).ok());

  EXPECT_EQ(std::memcmp(copied.data(), expected.data(), copied.size()), 0);
  ExpectGoodContext();
}

TEST_P(LocalMemoryGpuTest, RowsOnAPeerGpuHaveTheBitsOfStagedRows) {
  if (NumGpus() < 2) GTEST_SKIP() << "needs two GPUs";
  MemoryExporter exporter;
  const auto slice = Export(exporter, 1);
  ASSERT_TRUE(slice.has_value());
  const auto memory = MakeMemory();

  ExpectStagedBits(ScoreSlice(*memory, *slice));

  DeviceSlice elsewhere = *slice;
  MemoryExporter of_gpu_0;
  elsewhere.device_uuid = Export(of_gpu_0, 0)->device_uuid;
  const Outcome wrong_gpu = ScoreSlice(*memory, elsewhere);  // either refused or scored correctly
  if (wrong_gpu.status.ok()) ExpectStagedBits(wrong_gpu);
  ExpectGoodContext();
}

TEST_P(LocalMemoryGpuTest, MixesRunsInGpuMemoryAndInStaging) {
  MemoryExporter exporter;
  const auto slice = Export(exporter);
  ASSERT_TRUE(slice.has_value());
  const auto memory = MakeMemory();
  const auto payload = memory->Open(*slice);
  ASSERT_TRUE(payload.ok()) << payload.status();
  std::memcpy(staging_->data(), inputs_.hidden.data(), inputs_.hidden.size());

  std::vector<HiddenRun> runs;
  int64_t row = 0;
  for (const int64_t num_rows : {1, 64, 7, 100, 28, 99, 1}) {
    const bool is_staged = runs.size() % 2 == 0;
    const std::byte* base = is_staged ? staging_->data() : payload->pieces[0].data();
    runs.push_back({.data = base + row * row_bytes_,
                    .num_rows = num_rows,
                    .gpu = is_staged ? -1 : payload->gpu});
    row += num_rows;
  }
  ASSERT_EQ(row, kRows);

  ExpectStagedBits(Score(*engine_, inputs_, staging_->data(), runs));
}

TEST_P(LocalMemoryGpuTest, RowsInPinnedSharedMemoryHaveTheBitsOfStagedRows) {
  const size_t size = (inputs_.hidden.size() + 8'191) / 4'096 * 4'096;
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const auto bytes = absl::MakeSpan(static_cast<std::byte*>(mapped), size);
  const auto pinning = CreateCudaHostPinning(0);
  ASSERT_TRUE(pinning->pins());
  const absl::Status pinned = pinning->Pin(bytes);
  ASSERT_TRUE(pinned.ok()) << pinned;
  std::memcpy(bytes.data() + 64, inputs_.hidden.data(), inputs_.hidden.size());

  ExpectStagedBits(
      Score(*engine_, inputs_, staging_->data(), {{.data = bytes.data() + 64, .num_rows = kRows}}));

  pinning->Unpin(bytes);
  EXPECT_EQ(munmap(mapped, size), 0);
  ExpectGoodContext();
}

TEST_P(LocalMemoryGpuTest, AFailureToPinMemoryAffectsNothing) {
  const auto pinning = CreateCudaHostPinning(0);

  EXPECT_EQ(pinning->Pin(absl::MakeSpan(reinterpret_cast<std::byte*>(4'096), 4'096)).code(),
            absl::StatusCode::kResourceExhausted);

  ExpectGoodContext();
}

TEST_P(LocalMemoryGpuTest, RefusesGarbageHandles) {
  const auto memory = MakeMemory();
  MemoryExporter exporter;
  const auto slice = Export(exporter);
  ASSERT_TRUE(slice.has_value());
  for (int round = 0; round < 20; ++round) {
    DeviceSlice bad = *slice;
    for (size_t i = 0; i < bad.handle.size(); ++i) {
      bad.handle[i] = static_cast<uint8_t>(round == 0 ? 0 : round * 37 + static_cast<int>(i) * 11);
    }
    const absl::Status status = memory->Open(bad).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status)) << status;
  }

  EXPECT_EQ(memory->num_mappings(), 0);
  ExpectStagedBits(ScoreSlice(*memory, *slice));
  ExpectGoodContext();
}

TEST_P(LocalMemoryGpuTest, RefusesUnknownGpus) {
  MemoryExporter exporter;
  auto slice = Export(exporter);
  ASSERT_TRUE(slice.has_value());
  slice->device_uuid.fill(0xAB);
  const auto memory = MakeMemory();

  EXPECT_EQ(memory->Open(*slice).status().code(), absl::StatusCode::kFailedPrecondition);

  ExpectGoodContext();
}

TEST_P(LocalMemoryGpuTest, RefusesSlicesBeyondTheAllocation) {
  MemoryExporter exporter;
  const auto slice = Export(exporter);
  ASSERT_TRUE(slice.has_value());
  const auto memory = MakeMemory();
  DeviceSlice at_the_end = *slice;
  at_the_end.offset = kAllocationBytes - at_the_end.bytes;
  EXPECT_TRUE(memory->Open(at_the_end).ok());

  for (const int64_t offset :
       {kAllocationBytes - slice->bytes + 16, kAllocationBytes, kAllocationBytes * 1'000}) {
    DeviceSlice beyond = *slice;
    beyond.offset = offset;
    EXPECT_EQ(memory->Open(beyond).status().code(), absl::StatusCode::kInvalidArgument) << offset;
  }

  ExpectGoodContext();
}

TEST_P(LocalMemoryGpuTest, RefusesMemoryOfItsOwnProcess) {
  void* own = nullptr;
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&own, kAllocationBytes), cudaSuccess);
  cudaIpcMemHandle_t handle{};
  ASSERT_EQ(cudaIpcGetMemHandle(&handle, own), cudaSuccess);
  MemoryExporter exporter;
  DeviceSlice slice = *Export(exporter);
  std::memcpy(slice.handle.data(), &handle, sizeof(handle));
  const auto memory = MakeMemory();

  const absl::Status status = memory->Open(slice).status();

  EXPECT_TRUE(absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status)) << status;
  ExpectGoodContext();
  EXPECT_EQ(cudaFree(own), cudaSuccess);
}

TEST_P(LocalMemoryGpuTest, RefusesFreedMemoryAndMemoryOfAnEndedProcess) {
  for (const auto end : {&MemoryExporter::Free, &MemoryExporter::Kill}) {
    SCOPED_TRACE(end == &MemoryExporter::Free ? "freed" : "ended");
    MemoryExporter exporter;
    const auto slice = Export(exporter);
    ASSERT_TRUE(slice.has_value());
    (exporter.*end)();
    const auto memory = MakeMemory();

    const absl::Status status = memory->Open(*slice).status();

    EXPECT_TRUE(absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status)) << status;
    ExpectGoodContext();
  }
}

TEST_P(LocalMemoryGpuTest, WorksAfterAProcessEndsWhileItsMemoryIsMapped) {
  const auto memory = MakeMemory();
  {
    MemoryExporter exporter;
    const auto slice = Export(exporter);
    ASSERT_TRUE(slice.has_value());
    const auto payload = memory->Open(*slice);
    ASSERT_TRUE(payload.ok()) << payload.status();
    exporter.Kill();

    const Outcome outcome =
        Score(*engine_, inputs_, staging_->data(),
              {{.data = payload->pieces[0].data(), .num_rows = kRows, .gpu = payload->gpu}});

    if (outcome.status.ok()) ExpectStagedBits(outcome);
  }
  ExpectGoodContext();
}

TEST_P(LocalMemoryGpuTest, ClosesOnlyIdleMappings) {
  MemoryExporter first;
  MemoryExporter second;
  const auto kept_slice = Export(first);
  const auto idle_slice = Export(second);
  ASSERT_TRUE(kept_slice.has_value() && idle_slice.has_value());
  const auto memory = MakeMemory({.idle_time_max = absl::Milliseconds(1)});
  const auto kept = memory->Open(*kept_slice);
  ASSERT_TRUE(kept.ok()) << kept.status();

  EXPECT_TRUE(memory->Open(*idle_slice).ok());
  const absl::Time give_up = absl::Now() + absl::Seconds(10);
  while (memory->num_mappings() > 1 && absl::Now() < give_up) {
    absl::SleepFor(absl::Milliseconds(1));
  }

  EXPECT_EQ(memory->num_mappings(), 1);
  ExpectStagedBits(Score(*engine_, inputs_, staging_->data(),
                         {{.data = kept->pieces[0].data(), .num_rows = kRows, .gpu = kept->gpu}}));
  ExpectStagedBits(ScoreSlice(*memory, *idle_slice));  // opened again
}

TEST_P(LocalMemoryGpuTest, RefusesMappingsAboveItsLimit) {
  MemoryExporter first;
  MemoryExporter second;
  const auto one = Export(first);
  const auto other = Export(second);
  ASSERT_TRUE(one.has_value() && other.has_value());
  const auto memory = MakeMemory({.mappings_max = 1});
  const auto payload = memory->Open(*one);
  ASSERT_TRUE(payload.ok()) << payload.status();

  EXPECT_EQ(memory->Open(*other).status().code(), absl::StatusCode::kResourceExhausted);

  EXPECT_TRUE(memory->Open(*one).ok());
  ExpectGoodContext();
}

INSTANTIATE_TEST_SUITE_P(Shapes, LocalMemoryGpuTest,
                         ::testing::Values(Shape{"Packed", 1'024, 1}, Shape{"Padded", 1'001, 1},
                                           Shape{"Shards", 4'096, 2}),
                         [](const auto& shape) { return shape.param.name; });

}  // namespace
}  // namespace logprobd::testing

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == logprobd::testing::kExporterArgument) {
    return logprobd::testing::RunMemoryExporter();
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
