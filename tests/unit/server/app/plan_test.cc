#include "server/app/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/support/model_folder.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
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
          "device cpu was asked for",
          {},
          {{"host", "weights", 311'164'928}, {"host", "workspace", 12 << 20}}};
}

/// Of a server with these heads, on a host of unknown size.
std::string TextOf(std::vector<ServingPlan> heads) {
  const auto plan = MakeServerPlan(ServerOptions(), std::move(heads), {});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? PlanText(*plan) : "";
}

TEST(PlanTest, PrintsEveryFact) {
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
            "engine       cpu/avx512: device cpu was asked for\n"
            "memory       host  weights     296.8 MiB\n"
            "memory       host  workspace    12.0 MiB\n"
            "memory       host  staging      32.0 MiB\n"
            "memory       host  receive       2.0 GiB  (at most)\n"
            "memory       host  shared        2.0 GiB  (at most)\n"
            "memory       host  total         4.3 GiB\n"
            "warning      config.json says 151669\n");
}

TEST(PlanTest, PrintsTransformsAndEachPlaceOfMemory) {
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
                             "found; shards as asked: 1 replica of 2 shards",
                             {{0, 0, "gpu0", 0, 76'032}, {0, 1, "gpu11", 76'032, 76'033}},
                             {{"gpu0", "weights", 3 << 20}, {"gpu11", "weights", 2 << 20}}};

  const std::string text = TextOf({MakeServingPlan(ServerOptions(), Qwen(), engine, {})});

  EXPECT_THAT(text, HasSubstr("engine       cuda/fused: found; shards as asked: 1 replica of 2 "
                              "shards\n"
                              "layout       replica 0 shard 0  gpu0   ids 0 to 76032 (396 tiles)\n"
                              "layout       replica 0 shard 1  gpu11  ids 76032 to 76033 (1 tile)\n"
                              "memory       gpu0  weights       3.0 MiB\n"));
  EXPECT_THAT(text, HasSubstr("memory       gpu11 total         2.0 MiB\n"));
}

TEST(PlanTest, PrintsEachHeadAndTheSumsAgainstWhatIsThere) {
  HeadInfo small = Qwen();
  small.name = "draft";
  EnginePlan first = {Device::kCuda,
                      "cuda/fused",
                      "found",
                      {{0, 0, "gpu0", 0, 151'669}},
                      {{"gpu0", "weights", 5 << 20}, {"host", "workspace", 1 << 20}}};
  first.there = {{"gpu0", "there", 100 << 20}};
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

TEST(PlanTest, RefusesHeadsThatTheHostCanNeverHold) {
  const ServingPlan head = MakeServingPlan(ServerOptions(), Qwen(), CpuPlan(), {});
  constexpr int64_t kMib = 1 << 20;  // a head takes 341 MiB

  const auto one = MakeServerPlan(ServerOptions(), {head}, {300 * kMib, 200 * kMib});
  EXPECT_EQ(one.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(one.status().message(),
            "host memory: the head reserves 340.8 MiB, but the process can have 300.0 MiB: lower "
            "--batch-rows");
  const auto two = MakeServerPlan(ServerOptions(), {head, head}, {600 * kMib, 500 * kMib});
  EXPECT_EQ(two.status().message(),
            "host memory: all heads together reserve 681.5 MiB, but the process can have 600.0 "
            "MiB: lower --batch-rows or serve fewer heads");
}

TEST(PlanTest, WarnsOfMemoryThatOthersHaveNow) {
  const ServingPlan head = MakeServingPlan(ServerOptions(), Qwen(), CpuPlan(), {});
  constexpr int64_t kMib = 1 << 20;

  const auto plan = MakeServerPlan(ServerOptions(), {head}, {1000 * kMib, 300 * kMib});

  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->heads.back().warnings,
              ElementsAre("host memory: 340.8 MiB are to be reserved for the head, but only 300.0 "
                          "MiB are available now"));
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

TEST(PlanTest, CompletesTheHeadsFacts) {
  ServerOptions options;
  options.top_k_max = 5;
  EnginePlan engine = CpuPlan();
  engine.layout = {{0, 0, "cpu", 0, 151'669}};

  const ServingPlan plan = MakeServingPlan(options, Qwen(), engine, {});

  EXPECT_EQ(plan.head.engine, "cpu/avx512");
  EXPECT_EQ(plan.head.engine_reason, "device cpu was asked for");
  EXPECT_EQ(plan.head.limits.top_k_max, 5);
  ASSERT_EQ(plan.head.layout.size(), 1U);
  EXPECT_EQ(plan.head.layout[0].device, "cpu");
}

TEST(PlanTest, CountsStagingForTwoVersionsWhereWeightsCanBeSwapped) {
  ServerOptions options;
  EXPECT_EQ(MakeServingPlan(options, Qwen(), CpuPlan(), {}).memory.back().bytes, 32 << 20);

  options.admin = "127.0.0.1:1";
  EXPECT_EQ(MakeServingPlan(options, Qwen(), CpuPlan(), {}).memory.back().bytes, 64 << 20);
  options.weights_root = "none";
  EXPECT_EQ(MakeServingPlan(options, Qwen(), CpuPlan(), {}).memory.back().bytes, 32 << 20);
}

TEST(PlanTest, PromisesNoMoreThanOneClientMayQueue) {
  ServerOptions options;
  EXPECT_EQ(LimitsOf(options).request_rows_max, 65'536);
  EXPECT_EQ(LimitsOf(options).message_bytes_max, 64 << 20);

  options.queue_rows = 1'000;
  options.queue_bytes = 10'000;
  EXPECT_EQ(LimitsOf(options).request_rows_max, 500);
  EXPECT_EQ(LimitsOf(options).message_bytes_max, 5'000);

  options.queue_rows = 1;
  EXPECT_EQ(LimitsOf(options).request_rows_max, 1);
}

TEST(PlanTest, TurnsSettingsIntoThePartsOptions) {
  ServerOptions options;
  options.device = "cuda";
  options.gpus = {3, 2};
  options.shards = 2;
  options.replicas = 1;
  options.watchdog_s = 0.5;
  options.exchange = "nccl";
  options.batch_rows = 77;
  options.batch_wait_us = 9;
  options.valid_vocab = 11;
  options.weights_version = 4;

  EXPECT_EQ(EngineOptionsOf(options).device, Device::kCuda);
  EXPECT_THAT(EngineOptionsOf(options).gpus, ElementsAre(3, 2));
  EXPECT_EQ(EngineOptionsOf(options).shards, 2);
  EXPECT_EQ(EngineOptionsOf(options).replicas, 1);
  EXPECT_EQ(BatchTimeMaxOf(options, Device::kCpu), absl::Milliseconds(500));
  EXPECT_EQ(BatchTimeMaxOf(options, Device::kCuda), absl::Milliseconds(500));
  EXPECT_EQ(EngineOptionsOf(options).exchange, Exchange::kNccl);
  EXPECT_EQ(EngineOptionsOf(options).batch_rows_max, 77);
  EXPECT_EQ(BatcherOptionsOf(options).batch_rows_max, 77);
  EXPECT_EQ(BatcherOptionsOf(options).batch_wait_max, absl::Microseconds(9));
  EXPECT_EQ(ModelOptionsOf(options).valid_vocab, 11);
  EXPECT_EQ(ModelOptionsOf(options).weights_version, 4U);
  EXPECT_FALSE(ModelOptionsOf(ServerOptions()).valid_vocab.has_value());
  EXPECT_EQ(EngineOptionsOf(ServerOptions()).device, Device::kAuto);
  EXPECT_THAT(EngineOptionsOf(ServerOptions()).gpus, IsEmpty());
  EXPECT_EQ(EngineOptionsOf(ServerOptions()).exchange, Exchange::kAuto);
  EXPECT_EQ(BatchTimeMaxOf(ServerOptions(), Device::kCuda), absl::Seconds(120));
  EXPECT_EQ(BatchTimeMaxOf(ServerOptions(), Device::kCpu), absl::InfiniteDuration());
}

TEST(WeightsRootsTest, AreTheFolderAroundTheModelUnlessItIsTheWholeMachine) {
  const testing::ModelFolder folder;
  folder.WriteFile("model/config.json", "{}");
  folder.WriteFile("other/config.json", "{}");
  ServerOptions options;
  options.model = folder.PathOf("model");

  const auto roots = WeightsRootsOf(options);
  options.model = "/tmp";
  const auto own = WeightsRootsOf(options);

  EXPECT_TRUE((*roots)->CheckPath(folder.PathOf("other")).ok());
  EXPECT_FALSE((*roots)->CheckPath("/etc").ok());
  EXPECT_EQ((*own)->Text(), "'/tmp'");
}

TEST(WeightsRootsTest, AreThoseOfTheFlag) {
  const testing::ModelFolder folder;
  folder.WriteFile("a/x", "");
  folder.WriteFile("b/x", "");
  ServerOptions options;
  options.weights_root = folder.PathOf("a") + "," + folder.PathOf("b");

  EXPECT_EQ((*WeightsRootsOf(options))->Text(),
            "'" + folder.PathOf("a") + "', '" + folder.PathOf("b") + "'");
  options.weights_root = "none";
  EXPECT_EQ(*WeightsRootsOf(options), nullptr);
}

TEST(WeightsRootsTest, AreNoneWhereTheModelIsNotThere) {
  ServerOptions options;
  options.model = "/absent/model";

  EXPECT_EQ(*WeightsRootsOf(options), nullptr);
}

TEST(WeightsRootsTest, MustExistWhereTheyAreNamed) {
  ServerOptions options;
  options.weights_root = "/tmp,/absent";

  const absl::Status status = WeightsRootsOf(options).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/absent"));
}

}  // namespace
}  // namespace logprobd
