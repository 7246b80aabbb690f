#include "server/engine/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/common/tile.h"

namespace logprobd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int64_t kGib = int64_t{1} << 30;
constexpr int32_t kInt32Max = std::numeric_limits<int32_t>::max();

HeadInfo Head(int64_t vocab_size = 151'936) {
  HeadInfo head;
  head.vocab_size = vocab_size;
  return head;
}

/// Returns `count` H200s with `free_gib` GiB of free memory each.
std::vector<GpuInfo> Gpus(int32_t count, int64_t free_gib = 139) {
  std::vector<GpuInfo> gpus;
  for (int32_t ordinal = 0; ordinal < count; ++ordinal) {
    gpus.push_back({ordinal, "NVIDIA H200", 9, 0, 140 * kGib, free_gib * kGib});
  }
  return gpus;
}

/// Returns the needs of a head of `head_gib` GiB, divided evenly among the shards, and of a
/// workspace of 1 GiB.
std::function<GpuNeeds(int32_t)> NeedsOf(int64_t head_gib) {
  return [head_gib](int32_t num_shards) { return GpuNeeds{head_gib * kGib / num_shards, kGib}; };
}

EngineOptions Asked(int32_t replicas, int32_t shards, std::vector<int32_t> gpus = {}) {
  EngineOptions options;
  options.replicas = replicas;
  options.shards = shards;
  options.gpus = std::move(gpus);
  return options;
}

/// Returns "2x3: gpu0 gpu1 ...", or the error.
std::string Summary(const absl::StatusOr<Layout>& layout) {
  if (!layout.ok()) return layout.status().ToString();
  std::string text = absl::StrCat(layout->num_replicas, "x", layout->num_shards, ":");
  for (const ShardPlace& place : layout->places) absl::StrAppend(&text, " ", place.device);
  return text;
}

std::string Plan(const EngineOptions& options, const std::vector<GpuInfo>& gpus,
                 int64_t head_gib = 10) {
  return Summary(PlanGpuLayout(Head(), options, gpus, NeedsOf(head_gib)));
}

std::string ReasonOf(const EngineOptions& options, const std::vector<GpuInfo>& gpus,
                     int64_t head_gib) {
  const auto layout = PlanGpuLayout(Head(), options, gpus, NeedsOf(head_gib));
  EXPECT_TRUE(layout.ok()) << layout.status();
  return layout.ok() ? layout->reason : "";
}

std::vector<int64_t> Sizes(int64_t vocab_size, int32_t num_shards) {
  const auto ranges = PartitionTiles(vocab_size, num_shards);
  EXPECT_TRUE(ranges.ok()) << ranges.status();
  std::vector<int64_t> sizes;
  if (ranges.ok()) {
    for (const TileRange& range : *ranges) sizes.push_back(range.size());
  }
  return sizes;
}

TEST(PartitionTilesTest, GivesTheLargerRangesToTheFirstShards) {
  EXPECT_THAT(Sizes(151'936, 4), ElementsAre(198, 198, 198, 198));
  EXPECT_THAT(Sizes(10 * kernels::kTileColumns, 4), ElementsAre(3, 3, 2, 2));
  EXPECT_THAT(Sizes(4 * kernels::kTileColumns, 4), ElementsAre(1, 1, 1, 1));
  EXPECT_THAT(Sizes(1, 1), ElementsAre(1));
}

TEST(PartitionTilesTest, CoversEveryTileOnce) {
  for (const int64_t vocab_size : {1, 191, 192, 193, 1'003, 32'000, 151'669, 262'144}) {
    const int64_t num_tiles = kernels::NumTiles(vocab_size);
    for (int32_t num_shards = 1; num_shards <= num_tiles && num_shards <= 9; ++num_shards) {
      const auto ranges = PartitionTiles(vocab_size, num_shards);

      ASSERT_TRUE(ranges.ok()) << ranges.status();
      ASSERT_EQ(ranges->size(), static_cast<size_t>(num_shards));
      int64_t end = 0;
      for (const TileRange& range : *ranges) {
        EXPECT_EQ(range.begin, end);
        EXPECT_GE(range.size(), 1);
        end = range.end;
      }
      EXPECT_EQ(end, num_tiles) << vocab_size << " over " << num_shards;
    }
  }
}

TEST(PartitionTilesTest, NamesTheLargestNumberOfShards) {
  const auto too_many = PartitionTiles(1'003, 7);

  EXPECT_EQ(too_many.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(too_many.status().message()),
      HasSubstr("7 shards cannot share a vocabulary of 1003: it has 6 tiles of 192 columns, "
                "so at most 6 shards"));
  for (const int32_t num_shards : {0, -1}) {
    EXPECT_EQ(PartitionTiles(1'003, num_shards).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(GpuLayoutTest, MakesReplicasOfAHeadThatFitsTwiceOnAGpu) {
  const auto layout = PlanGpuLayout(Head(), {}, Gpus(4), NeedsOf(69));

  EXPECT_EQ(Summary(layout), "4x1: gpu0 gpu1 gpu2 gpu3");
  EXPECT_EQ(layout->reason,
            "head of 69.0 GiB fits twice on each GPU (139.0 GiB free): 4 replicas of 1 shard");
}

TEST(GpuLayoutTest, ShardsALargerHeadOverTheFewestGpusThatHoldItTwice) {
  const auto layout = PlanGpuLayout(Head(), {}, Gpus(4), NeedsOf(70));

  EXPECT_EQ(Summary(layout), "2x2: gpu0 gpu1 gpu2 gpu3");
  EXPECT_EQ(layout->reason,
            "head of 70.0 GiB does not fit twice on one GPU (139.0 GiB free): 2 replicas of 2 "
            "shards");
  EXPECT_EQ(Plan({}, Gpus(8), 250), "2x4: gpu0 gpu1 gpu2 gpu3 gpu4 gpu5 gpu6 gpu7");
}

TEST(GpuLayoutTest, TakesTheFewestShardsThatFitWhereNoneFitsTwice) {
  EXPECT_EQ(Plan({}, Gpus(1), 100), "1x1: gpu0");
  EXPECT_EQ(ReasonOf({}, Gpus(1), 100),
            "head of 100.0 GiB fits once, not twice, on 1 GPU (139.0 GiB free): 1 replica of 1 "
            "shard");
  EXPECT_EQ(Plan({}, Gpus(2), 200), "1x2: gpu0 gpu1");
  EXPECT_THAT(ReasonOf({}, Gpus(2), 200), HasSubstr("fits once, not twice, on 2 GPUs"));
}

TEST(GpuLayoutTest, NamesUnusedGpusInTheReason) {
  EXPECT_EQ(Plan({}, Gpus(5), 100), "2x2: gpu0 gpu1 gpu2 gpu3");
  EXPECT_THAT(ReasonOf({}, Gpus(5), 100), EndsWith("2 replicas of 2 shards; not used: gpu4"));
  EXPECT_THAT(ReasonOf(Asked(1, 0), Gpus(3), 10), EndsWith("not used: gpu1, gpu2"));
}

TEST(GpuLayoutTest, KeepsRequestedNumbers) {
  EXPECT_EQ(Plan(Asked(2, 2), Gpus(4)), "2x2: gpu0 gpu1 gpu2 gpu3");
  EXPECT_EQ(Plan(Asked(1, 2), Gpus(4)), "1x2: gpu0 gpu1");
  EXPECT_EQ(Plan(Asked(0, 2), Gpus(4)), "2x2: gpu0 gpu1 gpu2 gpu3");
  EXPECT_EQ(Plan(Asked(0, 3), Gpus(4)), "1x3: gpu0 gpu1 gpu2");
  EXPECT_EQ(Plan(Asked(2, 0), Gpus(4)), "2x1: gpu0 gpu1");
  EXPECT_EQ(Plan(Asked(2, 0), Gpus(4), 100), "2x2: gpu0 gpu1 gpu2 gpu3");
  EXPECT_EQ(ReasonOf(Asked(2, 2), Gpus(4), 10),
            "replicas and shards as requested: 2 replicas of 2 shards");
  EXPECT_EQ(ReasonOf(Asked(0, 4), Gpus(4), 10), "shards as requested: 1 replica of 4 shards");
  EXPECT_EQ(ReasonOf(Asked(4, 0), Gpus(4), 10), "replicas as requested: 4 replicas of 1 shard");
}

TEST(GpuLayoutTest, UsesNamedGpusInTheirOrder) {
  const auto layout = PlanGpuLayout(Head(), Asked(2, 2, {5, 2, 7, 0}), Gpus(8), NeedsOf(10));

  ASSERT_EQ(Summary(layout), "2x2: gpu5 gpu2 gpu7 gpu0");
  EXPECT_EQ(layout->places[1].replica, 0);
  EXPECT_EQ(layout->places[1].shard, 1);
  EXPECT_EQ(layout->places[2].replica, 1);
  EXPECT_EQ(layout->places[2].shard, 0);
}

TEST(GpuLayoutTest, UsesAllNamedGpus) {
  EXPECT_EQ(Plan(Asked(0, 0, {3, 1}), Gpus(4)), "2x1: gpu3 gpu1");
  EXPECT_EQ(Plan(Asked(2, 0, {0, 1, 2, 3}), Gpus(4)), "2x2: gpu0 gpu1 gpu2 gpu3");
  // Two of the three GPUs would hold the head twice, but all named GPUs are used.
  EXPECT_EQ(Plan(Asked(0, 0, {0, 1, 2}), Gpus(4), 100), "1x3: gpu0 gpu1 gpu2");
}

TEST(GpuLayoutTest, CutsTheVocabularyAtTilesAndEndsItWithTheLastValidId) {
  const auto layout = PlanGpuLayout(Head(151'669), Asked(1, 4), Gpus(4), NeedsOf(10));

  ASSERT_TRUE(layout.ok()) << layout.status();
  std::vector<int64_t> begins;
  std::vector<int64_t> ends;
  for (const ShardPlace& place : layout->places) {
    begins.push_back(place.vocab_begin);
    ends.push_back(place.vocab_end);
  }
  EXPECT_THAT(begins, ElementsAre(0, 38'016, 76'032, 113'856));
  EXPECT_THAT(ends, ElementsAre(38'016, 76'032, 113'856, 151'669));
}

TEST(GpuLayoutTest, RefusesAGpuThatDoesNotExistOrIsNamedTwice) {
  EXPECT_THAT(Plan(Asked(0, 0, {0, 5}), Gpus(4)),
              AllOf(StartsWith("FAILED_PRECONDITION"),
                    HasSubstr("GPU 5 does not exist: GPUs are numbered from 0, and there are 4")));
  EXPECT_THAT(Plan(Asked(0, 0, {1}), Gpus(1)),
              HasSubstr("GPU 1 does not exist: GPUs are numbered from 0, and there is 1"));
  EXPECT_THAT(Plan(Asked(0, 0, {-1}), Gpus(1)), HasSubstr("GPU -1 does not exist"));
  EXPECT_THAT(Plan(Asked(0, 0, {1, 0, 1}), Gpus(4)),
              AllOf(StartsWith("INVALID_ARGUMENT"), HasSubstr("GPU 1 is named twice")));
  EXPECT_THAT(Plan({}, {}), AllOf(StartsWith("FAILED_PRECONDITION"), HasSubstr("no GPU")));
}

TEST(GpuLayoutTest, SaysHowManyGpusAreNeededAndHowManyExist) {
  EXPECT_THAT(Plan(Asked(2, 4), Gpus(4)),
              AllOf(StartsWith("FAILED_PRECONDITION"),
                    HasSubstr("2 replicas of 4 shards need 8 GPUs, but there are 4")));
  EXPECT_THAT(Plan(Asked(0, 2), Gpus(1)), HasSubstr("2 shards need 2 GPUs, but there is 1"));
  EXPECT_THAT(Plan(Asked(3, 0, {0, 1}), Gpus(4)),
              HasSubstr("3 replicas need 3 GPUs, but --gpus names 2"));
  EXPECT_THAT(Plan(Asked(kInt32Max, 16), Gpus(4)), HasSubstr("need 34359738352 GPUs"));
}

TEST(GpuLayoutTest, RefusesMoreShardsThanCanExchangeWithEachOther) {
  EXPECT_THAT(Plan(Asked(1, 17), Gpus(20)),
              AllOf(StartsWith("INVALID_ARGUMENT"), HasSubstr("at most 16 GPUs share one head")));
  EXPECT_EQ(Plan({}, Gpus(20), 2'100).substr(0, 5), "1x16:");
}

TEST(GpuLayoutTest, SaysWhichNumbersFitTheNamedGpus) {
  EXPECT_THAT(Plan(Asked(0, 3, {0, 1, 2, 3}), Gpus(4)),
              AllOf(StartsWith("INVALID_ARGUMENT"),
                    HasSubstr("3 shards would leave GPUs unused: --gpus names 4, so replicas x "
                              "shards must be 4 x 1 or 2 x 2 or 1 x 4")));
  EXPECT_THAT(Plan(Asked(1, 2, {0, 1, 2, 3}), Gpus(4)), HasSubstr("1 replica of 2 shards would"));
  EXPECT_THAT(Plan(Asked(3, 0, {0, 1, 2, 3}), Gpus(4)), HasSubstr("3 replicas would leave"));
}

TEST(GpuLayoutTest, NeverCutsATile) {
  const HeadInfo small = Head(300);

  EXPECT_EQ(Summary(PlanGpuLayout(small, Asked(0, 2), Gpus(4), NeedsOf(10))),
            "2x2: gpu0 gpu1 gpu2 gpu3");
  EXPECT_THAT(Summary(PlanGpuLayout(small, Asked(0, 3), Gpus(4), NeedsOf(10))),
              AllOf(StartsWith("INVALID_ARGUMENT"), HasSubstr("at most 2 shards")));
  EXPECT_THAT(Summary(PlanGpuLayout(small, Asked(1, 0, {0, 1, 2}), Gpus(4), NeedsOf(10))),
              HasSubstr("must be 3 x 1"));
  EXPECT_THAT(Plan(Asked(-1, 0), Gpus(4)), StartsWith("INVALID_ARGUMENT"));
  EXPECT_THAT(Plan(Asked(0, -1), Gpus(4)), StartsWith("INVALID_ARGUMENT"));
}

TEST(GpuLayoutTest, RefusesGpusThatAreTooOld) {
  std::vector<GpuInfo> gpus = Gpus(2);
  gpus[1] = {1, "Tesla V100", 7, 0, 140 * kGib, 139 * kGib};

  EXPECT_THAT(Plan({}, gpus),
              AllOf(StartsWith("FAILED_PRECONDITION"),
                    HasSubstr("GPU 1 (Tesla V100, compute capability 7.0, 140.0 GiB) is too old")));
}

TEST(GpuLayoutTest, RefusesGpusOfTwoModelsAndNamesBoth) {
  const GpuInfo others[] = {{2, "NVIDIA H100", 9, 0, 140 * kGib, 139 * kGib},
                            {2, "NVIDIA H200", 10, 0, 140 * kGib, 139 * kGib},
                            {2, "NVIDIA H200", 9, 1, 140 * kGib, 139 * kGib},
                            {2, "NVIDIA H200", 9, 0, 138 * kGib, 137 * kGib}};
  for (const GpuInfo& other : others) {
    std::vector<GpuInfo> gpus = Gpus(4);
    gpus[2] = other;

    const std::string text = Plan({}, gpus);

    EXPECT_THAT(text, AllOf(StartsWith("FAILED_PRECONDITION"), HasSubstr("GPU 0 (NVIDIA H200"),
                            HasSubstr("GPU 2 ("), HasSubstr("differ")));
  }
}

TEST(GpuLayoutTest, ChecksOnlyTheGpusThatItUses) {
  std::vector<GpuInfo> gpus = Gpus(4);
  gpus[1] = {1, "Tesla V100", 7, 0, 16 * kGib, 1 * kGib};

  EXPECT_EQ(Plan(Asked(1, 1), gpus), "1x1: gpu0");
  EXPECT_EQ(Plan(Asked(0, 0, {2, 3}), gpus), "2x1: gpu2 gpu3");
}

TEST(GpuLayoutTest, TakesGpusWhoseMemoryDiffersByLessThanOnePercent) {
  std::vector<GpuInfo> gpus = Gpus(2);
  gpus[1].total_bytes -= kGib;

  EXPECT_EQ(Plan({}, gpus), "2x1: gpu0 gpu1");
}

// Regression: because of one busy GPU, a small head was sharded over all GPUs.
TEST(GpuLayoutTest, LeavesOutAGpuThatAnotherProcessHasFilled) {
  for (const size_t busy : {0U, 2U, 3U}) {
    std::vector<GpuInfo> gpus = Gpus(4);
    gpus[busy].free_bytes = 1 * kGib;

    const std::string unused = absl::StrCat("3 replicas of 1 shard; not used: gpu", busy);
    EXPECT_THAT(ReasonOf({}, gpus, 10), EndsWith(unused));
    EXPECT_EQ(Plan({}, gpus, 10).substr(0, 4), "3x1:");
    EXPECT_EQ(Plan(Asked(0, 1), gpus, 10).substr(0, 4), "3x1:");
  }
}

TEST(GpuLayoutTest, ShardsNamedGpusForTheOneWithTheLeastFreeMemory) {
  std::vector<GpuInfo> gpus = Gpus(2);
  gpus[1].free_bytes = 15 * kGib;

  EXPECT_EQ(Plan(Asked(0, 0, {0, 1}), gpus, 10), "1x2: gpu0 gpu1");
  EXPECT_THAT(ReasonOf(Asked(0, 0, {0, 1}), gpus, 10),
              HasSubstr("does not fit twice on one GPU (15.0 GiB free)"));
}

TEST(GpuLayoutTest, SubtractsMemoryThatOtherHeadsWillTake) {
  std::vector<GpuInfo> gpus = Gpus(3);

  Reserve({{"gpu1", "weights", 100 * kGib},
           {"gpu1", "workspace", kGib},
           {"host", "staging", kGib},
           {"gpu2", "weights", 200 * kGib}},
          gpus);

  EXPECT_EQ(gpus[0].free_bytes, 139 * kGib);
  EXPECT_EQ(gpus[1].free_bytes, 38 * kGib);
  EXPECT_EQ(gpus[1].reserved_bytes, 101 * kGib);
  EXPECT_EQ(gpus[2].free_bytes, 0);
  EXPECT_EQ(Plan(Asked(1, 1), gpus, 60), "1x1: gpu0");
  EXPECT_THAT(
      Plan(Asked(1, 1, {1}), gpus, 60),
      HasSubstr(
          "GPU 1 has 38.0 GiB free after 101.0 GiB for the heads before this one, but the head "
          "needs 61.0 GiB"));
}

TEST(GpuLayoutTest, CountsMemoryThatWillBeReleasedAsFree) {
  std::vector<GpuInfo> gpus = Gpus(1);
  gpus[0].free_bytes = 20 * kGib;

  Reserve({{"gpu0", "weights", -60 * kGib}}, gpus);

  EXPECT_EQ(Plan(Asked(1, 1), gpus, 60), "1x1: gpu0");
  EXPECT_THAT(Plan(Asked(1, 1), gpus, 90),
              HasSubstr("GPU 0 has 80.0 GiB free, but the head needs"));
}

TEST(GpuLayoutTest, NamesTheGpuWithoutRoomAndTheShardsThatWouldFit) {
  std::vector<GpuInfo> gpus = Gpus(4);
  gpus[1].free_bytes = 30 * kGib;

  const std::string text = Plan(Asked(0, 1, {0, 1, 2, 3}), gpus, 80);

  EXPECT_THAT(text,
              AllOf(StartsWith("FAILED_PRECONDITION"),
                    HasSubstr("GPU 1 has 30.0 GiB free, but the head needs 81.0 GiB (weight 80.0 "
                              "GiB, workspace 1.0 GiB): --shards 4 --replicas 1 would fit")));
  EXPECT_THAT(
      Plan(Asked(2, 2), Gpus(8), 300),
      HasSubstr("GPU 0 has 139.0 GiB free, but each of 2 shards needs 151.0 GiB (weight 150.0 "
                "GiB, workspace 1.0 GiB): --shards 3 --replicas 2 would fit"));
  EXPECT_THAT(Plan(Asked(4, 1, {0, 1, 2, 3}), Gpus(4), 200),
              HasSubstr("--shards 2 --replicas 2 would fit"));
  EXPECT_THAT(Plan(Asked(4, 1), Gpus(4), 200), HasSubstr("--shards 2 --replicas 1 would fit"));
}

TEST(GpuLayoutTest, SaysWhenNoNumberOfShardsFits) {
  EXPECT_THAT(Plan({}, Gpus(2), 1'000), AllOf(StartsWith("FAILED_PRECONDITION"),
                                              HasSubstr("each of 2 shards needs 501.0 GiB"),
                                              HasSubstr("no number of shards would fit")));
}

TEST(GpuLayoutTest, CountsHugeNeedsWithoutOverflow) {
  const auto huge = [](int32_t) {
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
    return GpuNeeds{kMax - 1, kMax - 1};
  };

  const auto layout = PlanGpuLayout(Head(), {}, Gpus(2), huge);

  EXPECT_EQ(layout.status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(CpuLayoutTest, IsOneShardByDefault) {
  const auto layout = PlanCpuLayout(Head(1'003), {});

  ASSERT_EQ(Summary(layout), "1x1: cpu");
  EXPECT_EQ(layout->places[0].vocab_begin, 0);
  EXPECT_EQ(layout->places[0].vocab_end, 1'003);
  EXPECT_EQ(layout->reason, "1 replica of 1 shard by default");
}

TEST(CpuLayoutTest, KeepsRequestedNumbers) {
  const auto layout = PlanCpuLayout(Head(1'003), Asked(2, 6));

  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->num_replicas, 2);
  EXPECT_EQ(layout->num_shards, 6);
  ASSERT_EQ(layout->places.size(), 12U);
  EXPECT_EQ(layout->places.back().replica, 1);
  EXPECT_EQ(layout->places.back().vocab_begin, 960);
  EXPECT_EQ(layout->places.back().vocab_end, 1'003);
  EXPECT_EQ(layout->reason, "2 replicas of 6 shards as requested");
  EXPECT_EQ(Summary(PlanCpuLayout(Head(), Asked(0, 2, {7}))), "1x2: cpu cpu");
}

TEST(CpuLayoutTest, RefusesTooManyShardsOrReplicas) {
  EXPECT_THAT(Summary(PlanCpuLayout(Head(1'003), Asked(0, 7))),
              AllOf(StartsWith("INVALID_ARGUMENT"), HasSubstr("at most 6 shards")));
  EXPECT_TRUE(PlanCpuLayout(Head(), Asked(64, 4)).ok());
  EXPECT_THAT(Summary(PlanCpuLayout(Head(), Asked(257, 0))),
              AllOf(StartsWith("INVALID_ARGUMENT"), HasSubstr("at most 256")));
  EXPECT_THAT(Summary(PlanCpuLayout(Head(), Asked(kInt32Max, 700))), HasSubstr("at most 256"));
}

}  // namespace
}  // namespace logprobd
