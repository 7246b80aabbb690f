#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "server/engine/cuda_engine.h"
#include "tests/support/engine_suite.h"

namespace logprobd::testing {
namespace {

absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateForTest(const HeadWeights& head,
                                                             int64_t batch_rows_max) {
  EngineOptions options;
  options.batch_rows_max = batch_rows_max;
  LOGPROBD_ASSIGN_OR_RETURN(const EnginePlan plan, PlanCudaEngine(head.info(), options, "test"));
  return CreateCudaEngine(head, plan, options);
}

std::string SkipReason() {
  HeadInfo head;
  head.vocab_size = head.vocab_rows = head.hidden_size = 1;
  const auto plan = PlanCudaEngine(head, {}, "");
  return plan.ok() ? "" : std::string(plan.status().message());
}

std::vector<EngineUnderTest> Engines() {
  EngineUnderTest engine;
  engine.name = "Chunked";
  engine.create = CreateForTest;
  // Tensor cores truncate what they accumulate; fp32 heads add up in one chain of fp32.
  engine.tolerances.logprob_wide = 1e-3;
  engine.tolerances.logprob_f32 = 2e-5;
  engine.skip_reason = SkipReason();
  return {engine};
}

INSTANTIATE_TEST_SUITE_P(Cuda, EngineSuite, ::testing::ValuesIn(Engines()), EngineName);

TEST(CudaEngineTest, PlansWithoutAGpuSayWhatIsMissing) {
  HeadInfo head;
  head.vocab_size = head.vocab_rows = 1'000;
  head.hidden_size = 64;
  EngineOptions options;
  options.gpu = 1'000;

  const auto plan = PlanCudaEngine(head, options, "");

  EXPECT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(plan.status().message()),
              ::testing::AnyOf(::testing::HasSubstr("no NVIDIA driver/GPU"),
                               ::testing::HasSubstr("GPU 1000 does not exist")));
}

TEST(CudaEngineTest, ThePlanNamesEveryMemory) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  HeadInfo head;
  head.vocab_size = head.vocab_rows = 151'936;
  head.hidden_size = 4'096;

  const auto plan = PlanCudaEngine(head, {}, "asked for");

  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->engine, "cuda/chunked");
  EXPECT_THAT(plan->reason, ::testing::StartsWith("asked for; "));
  ASSERT_EQ(plan->memory.size(), 3U);
  EXPECT_EQ(plan->memory[0].kind, "weights");
  EXPECT_GE(plan->memory[0].bytes, int64_t{151'936} * 4'096 * 2);
  EXPECT_EQ(plan->memory[1].kind, "workspace");
  EXPECT_LE(plan->memory[1].bytes, int64_t{512} << 20);
}

TEST(CudaEngineTest, RefusesABatchAboveItsLimitAndStaysHealthy) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  const auto head = MakeRandomHead({});
  auto engine = CreateForTest(*head, 64);
  ASSERT_TRUE(engine.ok()) << engine.status();

  const EngineScores refused = RunCase(**engine, MakeRandomCase(*head, 65));
  const EngineScores scored = RunCase(**engine, MakeRandomCase(*head, 64));

  EXPECT_EQ(refused.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(scored.status.ok()) << scored.status;
  EXPECT_TRUE((*engine)->healthy());
}

TEST(CudaEngineTest, RecordsStagesAndFlops) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  Metrics metrics({.heads = {"test"}, .has_gpu = true});
  const auto head = MakeRandomHead({.vocab_size = 1'000, .hidden_size = 64});
  EngineOptions options;
  options.batch_rows_max = 64;
  options.metrics = &metrics;
  const auto plan = PlanCudaEngine(head->info(), options, "test");
  ASSERT_TRUE(plan.ok()) << plan.status();
  auto engine = CreateCudaEngine(*head, *plan, options);
  ASSERT_TRUE(engine.ok()) << engine.status();

  ASSERT_TRUE(RunCase(**engine, MakeRandomCase(*head, 10)).status.ok());

  const std::string text = metrics.Serialize();
  for (const char* stage : {"h2d", "kernel", "combine", "d2h"}) {
    EXPECT_THAT(text, ::testing::HasSubstr("logprobd_stage_duration_seconds_count{stage=\"" +
                                           std::string(stage) + "\"} 1"));
  }
  EXPECT_THAT(text, ::testing::HasSubstr("logprobd_flops_total{gpu=\"0\"} 1280000"));
}

TEST(CudaEngineTest, TellsHowFarTheWeightIsRead) {
  if (!SkipReason().empty()) GTEST_SKIP() << SkipReason();
  const auto head = MakeRandomHead({.vocab_size = 9'000, .hidden_size = 1'024});
  EngineOptions options;
  std::vector<int64_t> done;
  int64_t total = 0;
  options.progress = [&](int64_t done_bytes, int64_t total_bytes) {
    done.push_back(done_bytes);
    total = total_bytes;
  };
  const auto plan = PlanCudaEngine(head->info(), options, "test");
  ASSERT_TRUE(plan.ok()) << plan.status();

  ASSERT_TRUE(CreateCudaEngine(*head, *plan, options).ok());

  EXPECT_EQ(total, int64_t{9'000} * 1'024 * 2);
  ASSERT_GE(done.size(), 2U);
  EXPECT_LT(done.front(), total);
  EXPECT_EQ(done.back(), total);
}

}  // namespace
}  // namespace logprobd::testing
