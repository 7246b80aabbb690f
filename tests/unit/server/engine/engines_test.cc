#include "server/engine/engines.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/cuda_engine.h"
#include "tests/support/in_memory_head.h"

namespace logprobd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

bool HasCuda(const HeadInfo& head) { return PlanCudaEngine(head, {}, "test").ok(); }

TEST(EnginesTest, UsesTheCpuWhenRequested) {
  const auto head = testing::MakeRandomHead({});

  const auto plan = PlanEngine(head->info(), {.device = Device::kCpu});

  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->device, Device::kCpu);
  EXPECT_THAT(plan->engine, StartsWith("cpu/"));
  EXPECT_THAT(plan->reason, StartsWith("device cpu was requested, so the CPU engine scores with "));
}

TEST(EnginesTest, WithoutAGpuAutoUsesTheCpuAndStatesWhy) {
  const auto head = testing::MakeRandomHead({});
  if (HasCuda(head->info())) GTEST_SKIP() << "this machine has a CUDA device";

  const auto plan = PlanEngine(head->info(), {.device = Device::kAuto});

  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->device, Device::kCpu);
  EXPECT_EQ(plan->reason.find(WhyNoCuda() + ", so the CPU engine scores with "), 0U)
      << plan->reason;
  EXPECT_THAT(plan->reason, Not(HasSubstr("install")));
}

TEST(EnginesTest, WithoutAGpuRequestingCudaFailsAndSaysWhatToInstall) {
  const auto head = testing::MakeRandomHead({});
  if (HasCuda(head->info())) GTEST_SKIP() << "this machine has a CUDA device";

  const auto plan = PlanEngine(head->info(), {.device = Device::kCuda});

  EXPECT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("install"));
}

TEST(EnginesTest, CreatesThePlannedEngine) {
  const auto head = testing::MakeRandomHead({});
  const EngineOptions options{.device = Device::kCpu, .batch_rows_max = 5, .cpu_threads = 1};
  const auto plan = PlanEngine(head->info(), options);
  ASSERT_TRUE(plan.ok()) << plan.status();

  const auto engines = CreateEngines(*head, *plan, options);

  ASSERT_TRUE(engines.ok()) << engines.status();
  ASSERT_EQ(engines->size(), 1U);
  EXPECT_EQ(engines->front()->info().engine, plan->engine);
  EXPECT_EQ(engines->front()->batch_rows_max(), 5);
}

}  // namespace
}  // namespace logprobd
