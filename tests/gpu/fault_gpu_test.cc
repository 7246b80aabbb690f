// A GPU fault makes the engine unhealthy. Each test runs in a process of its own, since the fault
// breaks the CUDA context of the process.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "tests/gpu/gpu_engine.h"
#include "tests/gpu/trap_kernel.h"
#include "tests/support/engine_case.h"
#include "tests/support/in_memory_head.h"

namespace logprobd::testing {
namespace {

void Expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "expected: %s\n", what);
  std::exit(1);
}

/// Scores `inputs` from `staging`, which was allocated before the fault.
absl::Status Score(ScoringEngine& engine, StagingBuffer& staging, const EngineCase& inputs) {
  const auto rows = static_cast<size_t>(inputs.num_rows());
  std::memcpy(staging.data(), inputs.hidden.data(), inputs.hidden.size());
  std::vector<float> logprob(rows);
  std::vector<uint8_t> nonfinite(rows);
  ScoreBatch batch;
  batch.dtype = inputs.dtype;
  batch.num_rows = inputs.num_rows();
  batch.hidden = staging.data();
  batch.targets = inputs.targets;
  batch.temperatures = inputs.temperatures;
  batch.outputs = OutputSet().With(Output::kLogprob);
  batch.logprob = absl::MakeSpan(logprob);
  batch.nonfinite = absl::MakeSpan(nonfinite);
  absl::Status status;
  absl::Notification done;
  engine.Start(batch, [&](absl::Status ended) {
    status = std::move(ended);
    done.Notify();
  });
  done.WaitForNotification();
  return status;
}

/// Scores batches before and after a fault on the GPU of the last shard, and checks their status.
[[noreturn]] void ScoreAfterAFault(int32_t shards) {
  {
    const auto head = MakeRandomHead({.vocab_size = 500});
    EngineOptions options;
    options.batch_rows_max = 64;
    auto engine = CreateGpuEngine(*head, options, shards);
    Expect(engine.ok(), "the engine is made");
    const EngineCase inputs = MakeRandomCase(*head, 5);
    auto staging = (*engine)->AllocateStaging(static_cast<int64_t>(inputs.hidden.size()));
    Expect(staging.ok(), "staging is allocated");
    Expect(Score(**engine, **staging, inputs).ok(), "the first batch is scored");
    Expect((*engine)->healthy(), "the engine is healthy");

    Expect(cudaSetDevice((shards - 1) % NumGpus()) == cudaSuccess, "the GPU is chosen");
    Expect(BreakContext() != cudaSuccess, "the context is broken");
    const absl::Status at_fault = Score(**engine, **staging, inputs);
    const absl::Status later = Score(**engine, **staging, inputs);

    Expect(absl::IsInternal(at_fault), "the batch after the fault gets INTERNAL");
    Expect(at_fault.message().find("CUDA error") != std::string::npos, "the message says CUDA");
    Expect(absl::IsUnavailable(later), "later batches get UNAVAILABLE");
    Expect(!(*engine)->healthy(), "the engine is not healthy");
  }  // destruction must not hang
  std::exit(0);
}

TEST(GpuFaultTest, AFaultMakesTheEngineUnhealthyAndLaterBatchesUnavailable) {
  if (!NoGpuReason().empty()) GTEST_SKIP() << NoGpuReason();
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";

  for (const int32_t shards : {1, 2, 3}) {
    SCOPED_TRACE(::testing::Message() << shards << " shards");
    EXPECT_EXIT(ScoreAfterAFault(shards), ::testing::ExitedWithCode(0), "");
  }
}

}  // namespace
}  // namespace logprobd::testing
