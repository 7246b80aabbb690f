#include "server/app/heads/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

HeadInfo Qwen() {
  HeadInfo head;
  head.name = "default";
  head.model_type = "qwen3";
  head.tensor = "model.embed_tokens.weight";
  head.hidden_size = 1'024;
  head.vocab_size = 151'669;
  head.vocab_rows = 151'936;
  head.tied = true;
  head.weight_bytes = 311'164'928;
  return head;
}

EnginePlan CpuPlan() {
  return {Device::kCpu,
          "cpu/avx512",
          "device cpu was requested",
          {},
          {{"host", "weights", 311'164'928}, {"host", "workspace", 12 << 20}}};
}

/// Returns the plan text of a server with these heads on a host of unknown size.
std::string TextOf(std::vector<ServingPlan> heads) {
  const auto plan = MakeServerPlan(ServerOptions(), std::move(heads), {});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? PlanText(*plan) : "";
}

TEST(PlanTest, PrintsEveryValue) {
  const ServingPlan plan =
      MakeServingPlan(ServerOptions(), Qwen(), CpuPlan(), {"config.json says 151669"});

  EXPECT_EQ(TextOf({plan}),
            "head         default\n"
            "model type   qwen3\n"
            "tensor       model.embed_tokens.weight (tied)\n"
            "version      1\n"
            "hidden       1024\n"
            "vocabulary   151936 rows, 151669 valid\n"
            "scale        none\n"
            "cap          none\n"
            "bias         none\n"
            "dtype        bf16\n"
            "weight       296.8 MiB (311164928 bytes)\n"
            "engine       cpu/avx512: device cpu was requested\n"
            "memory       host  weights     296.8 MiB\n"
            "memory       host  workspace    12.0 MiB\n"
            "memory       host  staging      32.0 MiB\n"
            "memory       host  receive       2.0 GiB  (at most)\n"
            "memory       host  shared        2.0 GiB  (at most)\n"
            "memory       host  total         4.3 GiB\n"
            "warning      config.json says 151669\n");
}

TEST(PlanTest, PrintsTransformsAndTheMemoryOfEachDevice) {
  HeadInfo head = Qwen();
  head.scale = 0.0625F;
  head.softcap = 30;
  head.has_bias = true;
  head.tied = false;
  const EnginePlan engine = {
      Device::kCuda, "cuda/chunked", "found", {}, {{"gpu0", "weights", 5 << 20}}};

  const std::string text = TextOf({MakeServingPlan(ServerOptions(), head, engine, {})});

  EXPECT_THAT(text, HasSubstr("scale        0.0625\n"));
  EXPECT_THAT(text, HasSubstr("cap          30\n"));
  EXPECT_THAT(text, HasSubstr("bias         yes\n"));
  EXPECT_THAT(text, HasSubstr("tensor       model.embed_tokens.weight\n"));
  EXPECT_THAT(text, HasSubstr("memory       gpu0  total         5.0 MiB\n"));
  EXPECT_THAT(text, HasSubstr("memory       host  total         4.0 GiB\n"));
}

TEST(PlanTest, PrintsALineForEachShardAndTheMemoryOfEachGpu) {
  const EnginePlan engine = {Device::kCuda,
                             "cuda/fused",
                             "found; shards as requested: 1 replica of 2 shards",
                             {{0, 0, "gpu0", 0, 76'032}, {0, 1, "gpu11", 76'032, 76'033}},
                             {{"gpu0", "weights", 3 << 20}, {"gpu11", "weights", 2 << 20}}};

  const std::string text = TextOf({MakeServingPlan(ServerOptions(), Qwen(), engine, {})});

  EXPECT_THAT(text, HasSubstr("engine       cuda/fused: found; shards as requested: 1 replica of 2 "
                              "shards\n"
                              "layout       replica 0 shard 0  gpu0   ids 0 to 76032 (396 tiles)\n"
                              "layout       replica 0 shard 1  gpu11  ids 76032 to 76033 (1 tile)\n"
                              "memory       gpu0  weights       3.0 MiB\n"));
  EXPECT_THAT(text, HasSubstr("memory       gpu11 total         2.0 MiB\n"));
}

TEST(PlanTest, PrintsEachHeadAndTheSumsWithTheFreeMemory) {
  HeadInfo small = Qwen();
  small.name = "draft";
  EnginePlan first = {Device::kCuda,
                      "cuda/fused",
                      "found",
                      {{0, 0, "gpu0", 0, 151'669}},
                      {{"gpu0", "weights", 5 << 20}, {"host", "workspace", 1 << 20}}};
  first.available = {{"gpu0", "available", 100 << 20}};
  EnginePlan second = first;
  second.memory.front().bytes = 3 << 20;
  std::vector<ServingPlan> heads = {MakeServingPlan(ServerOptions(), Qwen(), first, {"one"}),
                                    MakeServingPlan(ServerOptions(), small, second, {})};

  const auto plan =
      MakeServerPlan(ServerOptions(), std::move(heads), {int64_t{8} << 30, int64_t{4} << 30});

  ASSERT_TRUE(plan.ok()) << plan.status();
  const std::string text = PlanText(*plan);
  EXPECT_THAT(text, StartsWith("head         default\n"));
  EXPECT_THAT(text, HasSubstr("memory       gpu0  total         5.0 MiB\n"
                              "memory       host  workspace     1.0 MiB\n"
                              "memory       host  staging      32.0 MiB\n"
                              "memory       host  total        33.0 MiB\n"
                              "warning      one\n"
                              "\n"
                              "head         draft\n"));
  EXPECT_THAT(text, EndsWith("\n"
                             "all heads    default, draft\n"
                             "memory       gpu0  weights       8.0 MiB\n"
                             "memory       gpu0  total         8.0 MiB  of 100.0 MiB free\n"
                             "memory       host  workspace     2.0 MiB\n"
                             "memory       host  staging      64.0 MiB\n"
                             "memory       host  receive       2.0 GiB  (at most)\n"
                             "memory       host  shared        2.0 GiB  (at most)\n"
                             "memory       host  total         4.1 GiB  of 4.0 GiB free\n"));
}

TEST(PlanTest, RefusesHeadsThatNeverFitInHostMemory) {
  const ServingPlan head = MakeServingPlan(ServerOptions(), Qwen(), CpuPlan(), {});
  constexpr int64_t kMib = 1 << 20;  // a head takes 341 MiB

  const auto one = MakeServerPlan(ServerOptions(), {head}, {300 * kMib, 200 * kMib});
  EXPECT_EQ(one.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(one.status().message(),
            "host memory: the head reserves 340.8 MiB, but the process can have at most 300.0 MiB: "
            "lower --batch-rows");
  const auto two = MakeServerPlan(ServerOptions(), {head, head}, {600 * kMib, 500 * kMib});
  EXPECT_EQ(two.status().message(),
            "host memory: all heads together reserve 681.5 MiB, but the process can have at most "
            "600.0 MiB: lower --batch-rows or serve fewer heads");
}

TEST(PlanTest, WarnsIfHostMemoryIsNotAvailableNow) {
  const ServingPlan head = MakeServingPlan(ServerOptions(), Qwen(), CpuPlan(), {});
  constexpr int64_t kMib = 1 << 20;

  const auto plan = MakeServerPlan(ServerOptions(), {head}, {1000 * kMib, 300 * kMib});

  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->heads.back().warnings,
              ElementsAre("host memory: the head will reserve 340.8 MiB, but only 300.0 MiB are "
                          "available now"));
}

TEST(PlanTest, FindsTheGpusOfTheLayouts) {
  ServingPlan first;
  first.engine.layout = {{0, 0, "gpu3"}, {0, 1, "gpu12"}, {1, 0, "gpu3"}, {1, 1, "gpu0"}};
  ServingPlan second;
  second.engine.layout = {{0, 0, "gpu0"}, {0, 1, "gpu4"}};
  ServingPlan cpu;
  cpu.engine.layout = {{0, 0, "cpu"}};

  ServerPlan on_gpus;
  on_gpus.heads = {first, second};
  ServerPlan on_cpu;
  on_cpu.heads = {cpu};

  EXPECT_THAT(GpusOf(on_gpus), ElementsAre(3, 12, 0, 4));
  EXPECT_THAT(GpusOf(on_cpu), IsEmpty());
  EXPECT_THAT(GpusOf(ServerPlan()), IsEmpty());
}

TEST(PlanTest, CompletesTheHeadInfo) {
  ServerOptions options;
  options.top_k_max = 5;
  EnginePlan engine = CpuPlan();
  engine.layout = {{0, 0, "cpu", 0, 151'669}};

  const ServingPlan plan = MakeServingPlan(options, Qwen(), engine, {});

  EXPECT_EQ(plan.head.engine, "cpu/avx512");
  EXPECT_EQ(plan.head.engine_reason, "device cpu was requested");
  EXPECT_EQ(plan.head.limits.top_k_max, 5);
  ASSERT_EQ(plan.head.layout.size(), 1U);
  EXPECT_EQ(plan.head.layout[0].device, "cpu");
}

TEST(PlanTest, CountsTheMessagesOfBothGrpcListeners) {
  ServerOptions options;
  EXPECT_EQ(MakeServerPlan(options, {}, {})->receive_bytes, options.receive_bytes);

  options.admin = "unix:/run/admin";
  EXPECT_EQ(MakeServerPlan(options, {}, {})->receive_bytes, 2 * options.receive_bytes);
}

TEST(PlanTest, CountsStagingForTwoVersionsIfWeightsCanBeSwapped) {
  ServerOptions options;
  EXPECT_EQ(MakeServingPlan(options, Qwen(), CpuPlan(), {}).memory.back().bytes, 32 << 20);

  options.admin = "127.0.0.1:1";
  EXPECT_EQ(MakeServingPlan(options, Qwen(), CpuPlan(), {}).memory.back().bytes, 64 << 20);
  options.weights_root = "none";
  EXPECT_EQ(MakeServingPlan(options, Qwen(), CpuPlan(), {}).memory.back().bytes, 32 << 20);
}

ServingPlan PlanOn(Device device, std::vector<ShardPlace> layout) {
  ServingPlan plan;
  plan.head.vocab_size = 1'000;
  plan.head.hidden_size = 64;
  plan.engine.device = device;
  plan.engine.layout = std::move(layout);
  return plan;
}

ServerPlan Plan(std::vector<ServingPlan> heads) {
  ServerPlan plan;
  plan.heads = std::move(heads);
  return plan;
}

TEST(TurnHeadsTest, IsEmptyIfNoDeviceIsShared) {
  EXPECT_THAT(TurnHeadsOf(Plan({PlanOn(Device::kCuda, {{0, 0, "gpu0"}, {1, 0, "gpu1"}}),
                                PlanOn(Device::kCuda, {{0, 0, "gpu2"}})})),
              IsEmpty());
  EXPECT_THAT(TurnHeadsOf(Plan({PlanOn(Device::kCpu, {{0, 0, "cpu"}, {1, 0, "cpu"}})})), IsEmpty());
}

TEST(TurnHeadsTest, MakesEachReplicaALaneOnItsDevices) {
  const auto heads = TurnHeadsOf(Plan({PlanOn(Device::kCuda, {{0, 0, "gpu0"}, {1, 0, "gpu1"}}),
                                       PlanOn(Device::kCuda, {{0, 0, "gpu1"}})}));

  ASSERT_THAT(heads, SizeIs(2));
  ASSERT_THAT(heads[0].lanes, SizeIs(2));
  EXPECT_THAT(heads[0].lanes[0].devices, ElementsAre("gpu0"));
  EXPECT_THAT(heads[0].lanes[1].devices, ElementsAre("gpu1"));
  EXPECT_THAT(heads[1].lanes[0].devices, ElementsAre("gpu1"));
  EXPECT_EQ(heads[0].row_cost, 64'000);
  EXPECT_FALSE(AnyWaitsForPeers(heads));
}

TEST(TurnHeadsTest, OnlyShardsOnGpusWaitForPeers) {
  const auto on_gpus = TurnHeadsOf(Plan({PlanOn(Device::kCuda, {{0, 0, "gpu0"}, {0, 1, "gpu1"}}),
                                         PlanOn(Device::kCuda, {{0, 0, "gpu0"}})}));
  ASSERT_THAT(on_gpus, SizeIs(2));
  EXPECT_THAT(on_gpus[0].lanes[0].devices, ElementsAre("gpu0", "gpu1"));
  EXPECT_TRUE(on_gpus[0].lanes[0].waits_for_peers);
  EXPECT_FALSE(on_gpus[1].lanes[0].waits_for_peers);
  EXPECT_TRUE(AnyWaitsForPeers(on_gpus));

  const auto on_cpu = TurnHeadsOf(Plan({PlanOn(Device::kCpu, {{0, 0, "cpu"}, {0, 1, "cpu"}}),
                                        PlanOn(Device::kCpu, {{0, 0, "cpu"}})}));
  ASSERT_THAT(on_cpu, SizeIs(2));
  EXPECT_THAT(on_cpu[0].lanes[0].devices, ElementsAre("cpu"));
  EXPECT_FALSE(AnyWaitsForPeers(on_cpu));
}

}  // namespace
}  // namespace logprobd
