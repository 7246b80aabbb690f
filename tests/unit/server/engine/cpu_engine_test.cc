#include "server/engine/cpu_engine.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/common/tile.h"
#include "kernels/cpu/cpu_isa.h"
#include "server/base/errors.h"
#include "tests/support/engine_suite.h"

namespace logprobd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

/// Creates one replica with instruction set `isa` (empty: the best).
absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateOne(const HeadWeights& head,
                                                         const EngineOptions& options,
                                                         const std::string& isa = "") {
  LOGPROBD_ASSIGN_OR_RETURN(EnginePlan plan, PlanCpuEngine(head.info(), options, "test"));
  if (!isa.empty()) plan.engine = absl::StrCat("cpu/", isa);
  LOGPROBD_ASSIGN_OR_RETURN(auto engines, CreateCpuEngines(head, plan, options));
  return std::move(engines.front());
}

/// An engine for each instruction set that runs on this machine, and engines in 2 and 3 shards (at
/// most one shard per tile of the head).
std::vector<testing::EngineUnderTest> CpuEngines() {
  std::vector<testing::EngineUnderTest> engines;
  for (const kernels::CpuIsa isa : kernels::kAllCpuIsas) {
    if (!kernels::CpuIsaRuns(isa)) continue;
    const std::string name(kernels::CpuIsaName(isa));
    testing::EngineUnderTest engine;
    engine.name = name;
    engine.create = [name](const HeadWeights& head, int64_t batch_rows_max) {
      return CreateOne(head, {.batch_rows_max = batch_rows_max, .cpu_threads = 2}, name);
    };
    engines.push_back(std::move(engine));
  }
  for (const int32_t shards : {2, 3}) {
    testing::EngineUnderTest engine;
    engine.name = absl::StrCat("in_", shards, "_shards");
    engine.create = [shards](const HeadWeights& head, int64_t batch_rows_max) {
      const auto tiles = static_cast<int32_t>(kernels::NumTiles(head.info().vocab_size));
      return CreateOne(head, {.batch_rows_max = batch_rows_max,
                              .cpu_threads = shards + 1,
                              .shards = std::min(shards, tiles)});
    };
    engines.push_back(std::move(engine));
  }
  return engines;
}

}  // namespace

namespace testing {
INSTANTIATE_TEST_SUITE_P(Cpu, EngineSuite, ::testing::ValuesIn(CpuEngines()), EngineName);
}  // namespace testing

namespace {

TEST(CpuEngineTest, PlansTheBestInstructionSetAndStatesTheReason) {
  const auto head = testing::MakeRandomHead({.vocab_size = 1000, .hidden_size = 64});

  const auto plan = PlanCpuEngine(head->info(), {.cpu_threads = 3}, "device cpu was requested");

  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->device, Device::kCpu);
  EXPECT_EQ(plan->engine, absl::StrCat("cpu/", std::string(CpuIsaName(kernels::BestCpuIsa()))));
  EXPECT_THAT(plan->reason, StartsWith("device cpu was requested, so the CPU engine scores with "));
  EXPECT_THAT(plan->reason, HasSubstr(" on 3 threads; 1 replica of 1 shard by default"));
  ASSERT_EQ(plan->memory.size(), 2U);
  EXPECT_EQ(plan->memory[0].bytes, 6 * 192 * 64 * 2);
}

// Regression: the engine of an fp32 head was called cpu/avx512_bf16.
TEST(CpuEngineTest, NamesNoBf16InstructionsForHeadsThatUseNone) {
  for (const Dtype dtype : {Dtype::kF16, Dtype::kF32}) {
    const auto head =
        testing::MakeRandomHead({.vocab_size = 1000, .hidden_size = 64, .dtype = dtype});

    const auto plan = PlanCpuEngine(head->info(), {.cpu_threads = 1}, "test");

    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->engine,
              absl::StrCat("cpu/", std::string(CpuIsaName(std::min(kernels::BestCpuIsa(),
                                                                   kernels::CpuIsa::kAvx512)))));
    EXPECT_THAT(plan->reason, Not(HasSubstr("bf16")));
    EXPECT_TRUE(CreateCpuEngines(*head, *plan, {.cpu_threads = 1}).ok());
  }
}

TEST(CpuEngineTest, WorkspaceStaysBelow64MiB) {
  for (const int64_t batch_rows_max : {1, 8192, 1 << 20}) {
    for (const int32_t threads : {1, 2, 16, 64, 256}) {
      for (const int64_t hidden_size : {64, 1024, 8192, 65536}) {
        for (const int64_t vocab_size : {1, 32'000, 151'936, 1 << 20}) {
          HeadInfo info;
          info.hidden_size = hidden_size;
          info.vocab_size = info.vocab_rows = vocab_size;

          const auto plan = PlanCpuEngine(
              info, {.batch_rows_max = batch_rows_max, .cpu_threads = threads}, "test");

          ASSERT_TRUE(plan.ok()) << plan.status();
          EXPECT_LT(plan->memory[1].bytes, 64 << 20)
              << batch_rows_max << " rows, " << threads << " threads, hidden " << hidden_size
              << ", vocab " << vocab_size;
        }
      }
    }
  }
}

TEST(CpuEngineTest, RefusesAnUnknownEngineName) {
  const auto head = testing::MakeRandomHead({});

  const auto engine = CreateOne(*head, {}, "quantum");

  EXPECT_EQ(engine.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(engine.status().message()), HasSubstr("cpu/quantum"));
}

TEST(CpuEngineTest, ReportsTheProgressOfReadingTheWeight) {
  const auto head = testing::MakeRandomHead({.vocab_size = 1000, .hidden_size = 64});
  std::vector<int64_t> done;
  int64_t total = 0;
  EngineOptions options{.cpu_threads = 2};
  options.progress = [&](int64_t done_bytes, int64_t total_bytes) {
    done.push_back(done_bytes);
    total = total_bytes;
  };

  const auto engine = CreateOne(*head, options);

  ASSERT_TRUE(engine.ok()) << engine.status();
  EXPECT_EQ(total, 1000 * 64 * 2);
  EXPECT_EQ(done.size(), 6U);
  EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
  EXPECT_EQ(done.back(), total);
}

TEST(CpuEngineTest, BitsDoNotDependOnTheNumberOfThreads) {
  const auto head = testing::MakeRandomHead({.vocab_size = 3000, .hidden_size = 200});
  testing::EngineCase inputs = testing::MakeRandomCase(*head, 37);
  inputs.top_k = 5;
  std::vector<std::string> bits;
  for (const int32_t threads : {1, 2, 3, 8}) {
    const EngineOptions options{.batch_rows_max = 37, .cpu_threads = threads};
    const auto engine = CreateOne(*head, options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    const testing::EngineScores scores = testing::RunCase(**engine, inputs);
    std::string all;
    for (int64_t row = 0; row < 37; ++row) {
      all += testing::BitsOfRow(inputs, scores, row, inputs.outputs, true);
    }
    bits.push_back(all);
  }

  for (const std::string& other : bits) EXPECT_EQ(other, bits[0]);
}

TEST(CpuEngineTest, ABatchLargerThanTheWorkspaceHasTheSameBits) {
  // 2^20 columns of sums leave room for about a hundred rows in the workspace.
  const auto head = testing::MakeRandomHead({.vocab_size = 1 << 20, .hidden_size = 2});
  const testing::EngineCase inputs = testing::MakeRandomCase(*head, 150);
  const EngineOptions options{.batch_rows_max = 150, .cpu_threads = 2};
  const auto engine = CreateOne(*head, options);
  ASSERT_TRUE(engine.ok()) << engine.status();

  const testing::EngineScores scores = testing::RunCase(**engine, inputs);

  for (const int64_t row : {0, 63, 64, 111, 112, 149}) {
    const testing::EngineCase alone = testing::SelectRows(inputs, {row});
    EXPECT_EQ(testing::BitsOfRow(alone, testing::RunCase(**engine, alone), 0, alone.outputs, true),
              testing::BitsOfRow(inputs, scores, row, inputs.outputs, true));
  }
}

}  // namespace
}  // namespace logprobd
