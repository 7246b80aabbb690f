// Shards on the CPU return results that are bit-identical to those of an unsharded head, and a
// failure of one shard is contained.

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "server/engine/cpu_engine.h"
#include "tests/support/engine_case.h"
#include "tests/support/fake_clock.h"
#include "tests/support/faulty_collective.h"
#include "tests/support/faulty_resources.h"
#include "tests/support/in_memory_head.h"

namespace logprobd {
namespace {

using testing::EngineCase;
using testing::EngineScores;
using testing::FaultyCollective;
using testing::FaultyResources;
using ::testing::HasSubstr;
using testing::InMemoryHead;
using testing::RunCase;

constexpr OutputSet kAllOutputs = OutputSet(kAllOutputBits);

absl::StatusOr<std::unique_ptr<ScoringEngine>> Create(const HeadWeights& head,
                                                      EngineOptions options) {
  options.cpu_threads = 2;
  LOGPROBD_ASSIGN_OR_RETURN(const EnginePlan plan, PlanCpuEngine(head.info(), options, "test"));
  LOGPROBD_ASSIGN_OR_RETURN(auto engines, CreateCpuEngines(head, plan, options));
  return std::move(engines.front());
}

/// Returns rows that each have their own temperatures, entropy temperatures, candidates and a top-k
/// list. Every second target lies in the first or last column of a tile.
EngineCase MixedCase(const InMemoryHead& head, int64_t num_rows, Dtype dtype) {
  EngineCase inputs = testing::MakeRandomCase(head, num_rows, dtype);
  const int64_t vocab_size = head.info().vocab_size;
  inputs.top_k = static_cast<int32_t>(std::min<int64_t>(5, vocab_size));
  int64_t edge = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto i = static_cast<size_t>(row);
    inputs.temperatures[i] = 0.5F + 0.25F * static_cast<float>(row % 5);
    inputs.entropy_temperatures.push_back(row % 3 == 0 ? 1.0F : 0.75F);
    // Takes the last column of a tile, then the first of the next: shards begin and end there.
    if (row % 2 == 0) {
      edge = (edge + (row % 4 == 0 ? 191 : 1)) % vocab_size;
      inputs.targets[i] = static_cast<int32_t>(edge);
    }
    for (int64_t k = 0; k < row % 4; ++k) {
      inputs.candidate_rows.push_back(static_cast<int32_t>(row));
      inputs.candidate_ids.push_back(static_cast<int32_t>((row * 97 + k * 311) % vocab_size));
    }
  }
  return inputs;
}

std::string BitsOf(const EngineCase& inputs, const EngineScores& scores) {
  std::string bits;
  for (int64_t row = 0; row < inputs.num_rows(); ++row) {
    absl::StrAppend(&bits, testing::BitsOfRow(inputs, scores, row, kAllOutputs, true), "\n");
  }
  return bits;
}

TEST(CpuShardsTest, AnyNumberOfShardsHasTheBitsOfAnUnshardedHead) {
  struct Shape {
    int64_t vocab_size;
    int64_t hidden_size;
    Dtype head_dtype;
    Dtype hidden_dtype;
  };
  // The first head has eight tiles, and the last of them has one column. The second has eight full
  // tiles, which is also the largest number of shards. The third has 20 tiles, which cannot be
  // divided evenly among 3 or 8 shards.
  for (const Shape& shape : {Shape{7 * 192 + 1, 70, Dtype::kBf16, Dtype::kBf16},
                             Shape{8 * 192, 33, Dtype::kF32, Dtype::kF32},
                             Shape{19 * 192 + 100, 48, Dtype::kF16, Dtype::kF32}}) {
    const auto head = testing::MakeRandomHead({.vocab_size = shape.vocab_size,
                                               .hidden_size = shape.hidden_size,
                                               .padding_rows = 40,
                                               .dtype = shape.head_dtype,
                                               .logit_stddev = 8,
                                               .bias = true,
                                               .softcap = 30});
    const EngineCase inputs = MixedCase(*head, 41, shape.hidden_dtype);
    const auto whole = Create(*head, {.batch_rows_max = 41});
    ASSERT_TRUE(whole.ok()) << whole.status();
    const std::string expected = BitsOf(inputs, RunCase(**whole, inputs));

    for (const int32_t shards : {2, 3, 4, 5, 8}) {
      SCOPED_TRACE(absl::StrCat(shape.vocab_size, " columns in ", shards, " shards"));
      const auto engine = Create(*head, {.batch_rows_max = 41, .shards = shards});
      ASSERT_TRUE(engine.ok()) << engine.status();

      const EngineScores scores = RunCase(**engine, inputs);

      ASSERT_TRUE(scores.status.ok()) << scores.status;
      EXPECT_EQ(BitsOf(inputs, scores), expected);
    }
  }
}

TEST(CpuShardsTest, AnOutputAloneHasTheBitsOfAllOutputsTogether) {
  const auto head = testing::MakeRandomHead({.vocab_size = 1'003, .hidden_size = 64});
  EngineCase all = MixedCase(*head, 20, Dtype::kBf16);
  const auto engine = Create(*head, {.batch_rows_max = 20, .shards = 4});
  ASSERT_TRUE(engine.ok()) << engine.status();
  const EngineScores all_scores = RunCase(**engine, all);
  EngineCase one = all;
  one.top_k = 0;
  one.candidate_rows.clear();
  one.candidate_ids.clear();

  for (uint32_t bits = 1; bits <= kAllOutputBits; bits <<= 1) {
    one.outputs = OutputSet(bits);
    const EngineScores scores = RunCase(**engine, one);
    for (int64_t row = 0; row < 20; ++row) {
      ASSERT_EQ(testing::BitsOfRow(one, scores, row, one.outputs, false),
                testing::BitsOfRow(all, all_scores, row, one.outputs, false))
          << "outputs " << bits << ", row " << row;
    }
  }
}

TEST(CpuShardsTest, ABatchInSeveralStepsHasTheBitsOfSingleRows) {
  // With 2^20 columns a step takes a few hundred rows.
  const auto head = testing::MakeRandomHead({.vocab_size = 1 << 20, .hidden_size = 2});
  const EngineCase inputs = testing::MakeRandomCase(*head, 400);
  const auto engine = Create(*head, {.batch_rows_max = 400, .shards = 2});
  ASSERT_TRUE(engine.ok()) << engine.status();

  const EngineScores scores = RunCase(**engine, inputs);

  for (const int64_t row : {0, 150, 255, 256, 399}) {
    const EngineCase alone = testing::SelectRows(inputs, {row});
    EXPECT_EQ(testing::BitsOfRow(alone, RunCase(**engine, alone), 0, kAllOutputs, true),
              testing::BitsOfRow(inputs, scores, row, kAllOutputs, true));
  }
}

TEST(CpuShardsTest, ReadsEveryRowOnceAndReportsTheProgress) {
  const auto head = testing::MakeRandomHead({.vocab_size = 1'000, .hidden_size = 64});
  std::vector<int64_t> done;
  EngineOptions options{.shards = 4};
  options.progress = [&](int64_t done_bytes, int64_t total_bytes) {
    EXPECT_EQ(total_bytes, 1'000 * 64 * 2);
    done.push_back(done_bytes);
  };

  const auto engine = Create(*head, options);

  ASSERT_TRUE(engine.ok()) << engine.status();
  EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
  EXPECT_EQ(done.back(), 1'000 * 64 * 2);
}

TEST(CpuShardsTest, AShardWithoutMemoryAtStartFailsTheStart) {
  const auto head = testing::MakeRandomHead({.vocab_size = 1'000, .hidden_size = 64});
  for (const absl::string_view what : {"weight", "workspace"}) {
    FaultyResources resources;
    EngineOptions options{.shards = 3};
    options.resources = &resources;
    resources.memory = [&](int32_t shard, absl::string_view asked) {
      return shard == 2 && asked == what
                 ? absl::ResourceExhaustedError(absl::StrCat("no memory for the ", what))
                 : absl::OkStatus();
    };

    const auto engine = Create(*head, options);

    EXPECT_TRUE(absl::IsResourceExhausted(engine.status())) << engine.status();
  }
}

// E82: the start fails with one message if the shards cannot be connected.
TEST(CpuShardsTest, ACollectiveThatCannotBeCreatedFailsTheStart) {
  const auto head = testing::MakeRandomHead({.vocab_size = 1'000, .hidden_size = 64});
  FaultyResources resources;
  EngineOptions options{.shards = 3};
  options.resources = &resources;
  resources.collective = [](const std::unique_ptr<Collective>& /*real*/) {
    return absl::InternalError("NCCL did not connect the GPUs");
  };

  const auto engine = Create(*head, options);

  EXPECT_EQ(engine.status(), absl::InternalError("NCCL did not connect the GPUs"));
}

// E76: if one shard has no memory for a batch, only that batch fails.
TEST(CpuShardsTest, AShardWithoutMemoryFailsOnlyThatBatch) {
  const auto head = testing::MakeRandomHead({.vocab_size = 1'000, .hidden_size = 64});
  const EngineCase inputs = testing::MakeRandomCase(*head, 7);
  std::atomic<bool> is_short = false;
  FaultyResources resources;
  EngineOptions options{.batch_rows_max = 7, .shards = 3};
  options.resources = &resources;
  resources.memory = [&](int32_t shard, absl::string_view what) {
    return shard == 1 && what == "batch" && is_short
               ? absl::ResourceExhaustedError("no memory for a batch")
               : absl::OkStatus();
  };
  const auto engine = Create(*head, options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const EngineScores before = RunCase(**engine, inputs);

  is_short = true;
  const EngineScores failed = RunCase(**engine, inputs);
  is_short = false;
  const EngineScores after = RunCase(**engine, inputs);

  EXPECT_EQ(failed.status, absl::ResourceExhaustedError("no memory for a batch"));
  EXPECT_TRUE((*engine)->healthy());
  EXPECT_TRUE(after.status.ok()) << after.status;
  EXPECT_EQ(BitsOf(inputs, after), BitsOf(inputs, before));
}

// E79: an exchange that fails on any rank at any call fails the batch and its replica.
TEST(CpuShardsTest, ABrokenCollectiveFailsTheBatchAndTheReplica) {
  const auto head = testing::MakeRandomHead({.vocab_size = 1'000, .hidden_size = 64});
  EngineCase inputs = testing::MakeRandomCase(*head, 7);
  inputs.top_k = 3;
  for (const int32_t rank : {0, 2}) {
    for (const int call : {0, 1, 2}) {
      for (const auto fault :
           {FaultyCollective::Fault::kFails, FaultyCollective::Fault::kIsLater}) {
        SCOPED_TRACE(
            absl::StrCat("rank ", rank, ", call ", call, ", fault ", static_cast<int>(fault)));
        FaultyResources resources;
        EngineOptions options{.batch_rows_max = 7, .shards = 3};
        options.resources = &resources;
        resources.collective = [&](std::unique_ptr<Collective> real) {
          return std::make_unique<FaultyCollective>(std::move(real), fault, rank, call);
        };
        const auto engine = Create(*head, options);
        ASSERT_TRUE(engine.ok()) << engine.status();

        const EngineScores failed = RunCase(**engine, inputs);
        const EngineScores later = RunCase(**engine, inputs);

        EXPECT_TRUE(absl::IsInternal(failed.status)) << failed.status;
        EXPECT_EQ(failed.status.message(), "a link between the shards broke");
        EXPECT_EQ(CollectiveOf(failed.status), "faulty");
        EXPECT_FALSE((*engine)->healthy());
        EXPECT_TRUE(absl::IsUnavailable(later.status)) << later.status;
      }
    }
  }
}

// E78, E79: the watchdog detects a rank that never arrives.
TEST(CpuShardsTest, ARankThatHangsFailsTheBatchAfterItsTime) {
  const auto head = testing::MakeRandomHead({.vocab_size = 1'000, .hidden_size = 64});
  const EngineCase inputs = testing::MakeRandomCase(*head, 7);
  testing::FakeClock clock;
  FaultyResources resources;
  EngineOptions options{
      .batch_rows_max = 7, .shards = 3, .batch_time_max = absl::Seconds(60), .clock = &clock};
  options.resources = &resources;
  resources.collective = [](std::unique_ptr<Collective> real) {
    return std::make_unique<FaultyCollective>(std::move(real), FaultyCollective::Fault::kHangs, 1,
                                              1);
  };
  const auto engine = Create(*head, options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  testing::StartedCase batch(**engine, inputs);

  clock.WaitUntilAsleep();  // the finish thread waits for the batch
  clock.Advance(absl::Seconds(60));
  const EngineScores scores = batch.Wait();

  EXPECT_TRUE(absl::IsUnavailable(scores.status)) << scores.status;
  EXPECT_THAT(std::string(scores.status.message()), HasSubstr("1m"));
  EXPECT_FALSE((*engine)->healthy());
}

// E112: a batch that takes minutes on a slow CPU moves all the time.
TEST(CpuShardsTest, EveryTileOfABatchMovesTheHeartbeatOfItsRank) {
  const auto head = testing::MakeRandomHead({.vocab_size = 8 * 192, .hidden_size = 64});
  const EngineCase inputs = testing::MakeRandomCase(*head, 7);
  for (const int32_t num_shards : {1, 2}) {
    Heartbeats heartbeats;
    const auto engine =
        Create(*head, {.batch_rows_max = 7, .shards = num_shards, .heartbeats = &heartbeats});
    ASSERT_TRUE(engine.ok()) << engine.status();

    ASSERT_TRUE(RunCase(**engine, inputs).status.ok());

    for (const std::shared_ptr<const Heartbeat>& heartbeat : heartbeats.All()) {
      if (heartbeat->owner().thread == "engine-rank") {
        EXPECT_GT(heartbeat->beats(), 8 / num_shards);
      }
    }
  }
}

TEST(CpuShardsTest, ReplicasAreSeparateEnginesWithTheSameBits) {
  const auto head = testing::MakeRandomHead({.vocab_size = 1'000, .hidden_size = 64});
  const EngineCase inputs = MixedCase(*head, 11, Dtype::kBf16);
  const EngineOptions options{.batch_rows_max = 11, .cpu_threads = 4, .shards = 2, .replicas = 2};
  const auto plan = PlanCpuEngine(head->info(), options, "test");
  ASSERT_TRUE(plan.ok()) << plan.status();

  const auto engines = CreateCpuEngines(*head, *plan, options);

  ASSERT_TRUE(engines.ok()) << engines.status();
  ASSERT_EQ(engines->size(), 2U);
  EXPECT_EQ(BitsOf(inputs, RunCase(*engines->front(), inputs)),
            BitsOf(inputs, RunCase(*engines->back(), inputs)));
  EXPECT_EQ(engines->front()->memory()[0].bytes * 2, plan->memory[0].bytes);
}

}  // namespace
}  // namespace logprobd
