#include "server/engine/sharded_engine.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "server/engine/collective.h"
#include "server/metrics/metrics.h"
#include "tests/support/fake_clock.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;

/// State that all fake shards of a test share.
struct Devices {
  absl::Mutex mutex;
  std::vector<int32_t> enqueued;  ///< Slots that rank 0 has enqueued.
  std::vector<int32_t> collected;
  bool is_held = false;           ///< If true, batches are enqueued but do not end.
  absl::Status device;            ///< Error that IsDone of rank 1 returns.
  absl::Status agreed;            ///< Status that rank 1 passes to Agree.
  absl::Status copied;            ///< Error that Collect of rank 1 returns.
  int held_polls = 0;             ///< Further calls for which IsDone of rank 0 returns false.
  bool is_stuck = false;          ///< If true, Enqueue of rank 1 does not return.
  bool is_query_stuck = false;    ///< If true, IsDone of rank 1 does not return.
  bool is_in_stuck_call = false;  ///< Rank 1 is in a call that does not return.
  std::atomic<bool> is_idle = true;
  std::atomic<int> busy_polls = 0;  ///< Further calls for which IsIdle returns false.
};

class FakeShard final : public EngineShard {
 public:
  FakeShard(int32_t rank, Devices& devices) : rank_(rank), devices_(devices) {}

  absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t /*size_bytes*/) override {
    return absl::ResourceExhaustedError("none");
  }

  absl::Status Enqueue(ScoreBatch& /*batch*/, int32_t slot, RankTeam& team) override {
    absl::Status own;
    {
      const absl::MutexLock lock(&devices_.mutex);
      if (rank_ == 0) devices_.enqueued.push_back(slot);
      if (rank_ == 1) own = devices_.agreed;
      AwaitMove(devices_.is_stuck);
    }
    return team.Agree(rank_, std::move(own));
  }

  absl::StatusOr<bool> IsDone(int32_t /*slot*/) override {
    const absl::MutexLock lock(&devices_.mutex);
    AwaitMove(devices_.is_query_stuck);
    if (rank_ == 1 && !devices_.device.ok()) return devices_.device;
    if (rank_ == 0 && devices_.held_polls > 0) {
      --devices_.held_polls;
      return false;
    }
    return !devices_.is_held;
  }

  absl::StatusOr<ShardTimes> Collect(ScoreBatch& /*batch*/, int32_t slot) override {
    const absl::MutexLock lock(&devices_.mutex);
    if (rank_ == 0) devices_.collected.push_back(slot);
    if (rank_ == 1 && !devices_.copied.ok()) return devices_.copied;
    return ShardTimes{.h2d = 1.0 + rank_,
                      .gather = 0.5 + rank_,
                      .kernel = 5.0 - rank_,
                      .combine = 2.0 + rank_,
                      .d2h = 3};
  }

  bool IsIdle() override { return devices_.is_idle && devices_.busy_polls.fetch_sub(1) <= 0; }

 private:
  /// Does not return on rank 1 while `is_stuck`.
  void AwaitMove(const bool& is_stuck) {
    if (rank_ != 1) return;
    devices_.is_in_stuck_call = is_stuck;
    const auto moves = [&is_stuck] { return !is_stuck; };
    devices_.mutex.Await(absl::Condition(&moves));
    devices_.is_in_stuck_call = false;
  }

  const int32_t rank_;
  Devices& devices_;
};

/// A batch of one row, which fake shards do not change.
struct FakeBatch {
  ScoreBatch batch;
  absl::Status status = absl::UnknownError("not answered");
  absl::Mutex mutex;
  bool is_done = false;
  std::vector<int32_t> targets = {0};
  std::vector<float> temperatures = {1.0F};
  std::vector<uint8_t> nonfinite = {0};

  FakeBatch() {
    batch.num_rows = 1;
    batch.targets = targets;
    batch.temperatures = temperatures;
    batch.nonfinite = absl::MakeSpan(nonfinite);
  }

  void Start(ScoringEngine& engine) {
    engine.Start(batch, [this](absl::Status ended) {
      const absl::MutexLock lock(&mutex);
      status = std::move(ended);
      is_done = true;
    });
  }

  /// Aborts if the batch does not end within a minute of real time.
  const absl::Status& Wait() {
    const absl::MutexLock lock(&mutex);
    LOGPROBD_CHECK(mutex.AwaitWithTimeout(absl::Condition(&is_done), absl::Minutes(1)));
    return status;
  }
};

class ShardedEngineTest : public ::testing::Test {
 protected:
  std::unique_ptr<ScoringEngine> Create(int32_t num_shards) {
    ShardedEngineOptions options;
    options.info.name = "chat";
    options.info.vocab_size = 192 * num_shards;
    options.info.hidden_size = 4;
    options.batch_rows_max = 8;
    options.batch_time_max = absl::Seconds(30);
    options.rest_time_max = absl::ZeroDuration();
    options.clock = &clock_;
    options.metrics = metrics_;
    options.heartbeats = &heartbeats_;
    std::vector<std::unique_ptr<EngineShard>> shards;
    for (int32_t rank = 0; rank < num_shards; ++rank) {
      options.tiles.push_back({rank, rank + 1});
      options.gpus.push_back(rank);
      shards.push_back(std::make_unique<FakeShard>(rank, devices_));
    }
    auto collective = num_shards > 1 ? std::make_unique<InProcessCollective>(num_shards) : nullptr;
    auto engine = CreateShardedEngine(std::move(options), std::move(shards), std::move(collective));
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }

  void Hold(bool is_held) {
    const absl::MutexLock lock(&devices_.mutex);
    devices_.is_held = is_held;
  }

  void SetStuck(bool Devices::*call, bool is_stuck) {
    const absl::MutexLock lock(&devices_.mutex);
    devices_.*call = is_stuck;
  }

  /// Waits until rank 1 is in a call that does not return.
  void AwaitStuck() {
    const absl::MutexLock lock(&devices_.mutex);
    LOGPROBD_CHECK(devices_.mutex.AwaitWithTimeout(absl::Condition(&devices_.is_in_stuck_call),
                                                   absl::Minutes(1)));
  }

  /// Returns the heartbeats of the threads with this name.
  std::vector<std::shared_ptr<const Heartbeat>> HeartbeatsOf(const std::string& thread) const {
    std::vector<std::shared_ptr<const Heartbeat>> found;
    for (const std::shared_ptr<const Heartbeat>& each : heartbeats_.All()) {
      if (each->owner().thread == thread) found.push_back(each);
    }
    return found;
  }

  /// Returns for GPU 0 and GPU 1 whether the counter with these labels has the value `count`.
  std::vector<bool> AreCounted(const std::string& name, const std::string& labels, int count) {
    const std::string text = metrics_->Serialize();
    std::vector<bool> found;
    for (const int gpu : {0, 1}) {
      found.push_back(absl::StrContains(
          text, absl::StrCat(name, "{gpu=\"", gpu, "\",", labels, "} ", count, "\n")));
    }
    return found;
  }

  testing::FakeClock clock_;
  Devices devices_;
  Heartbeats heartbeats_;
  Metrics own_metrics_{{.heads = {"default"}, .version = "1", .commit = "a", .gpus = {0, 1}}};
  Metrics* metrics_ = &own_metrics_;
};

TEST_F(ShardedEngineTest, UsesItsSlotsInTurnAndEndsBatchesInOrder) {
  const auto engine = Create(2);

  for (int i = 0; i < 4; ++i) {
    FakeBatch batch;
    batch.Start(*engine);
    EXPECT_TRUE(batch.Wait().ok()) << batch.status;
  }

  EXPECT_THAT(devices_.enqueued, ElementsAre(0, 1, 0, 1));
  EXPECT_THAT(devices_.collected, ElementsAre(0, 1, 0, 1));
}

// Regression: memory was freed without waiting for the device, so a late kernel could write to
// memory that had a new owner.
TEST_F(ShardedEngineTest, DestructorWaitsUntilTheShardsAreIdle) {
  auto engine = Create(1);
  devices_.busy_polls = 3;

  engine.reset();

  EXPECT_LE(devices_.busy_polls, 0);
}

TEST_F(ShardedEngineTest, ReportsTheTimesOfTheSlowestShardAndTheLastStagesOfTheFirst) {
  const auto engine = Create(3);
  FakeBatch batch;

  batch.Start(*engine);
  ASSERT_TRUE(batch.Wait().ok()) << batch.status;

  EXPECT_EQ(batch.batch.h2d_seconds, 3);
  EXPECT_EQ(batch.batch.gather_seconds, 2.5);
  EXPECT_EQ(batch.batch.kernel_seconds, 5);
  EXPECT_EQ(batch.batch.combine_seconds, 2);
  EXPECT_EQ(batch.batch.d2h_seconds, 3);
}

TEST_F(ShardedEngineTest, RefusesABatchThatDoesNotFitBeforeAnyShard) {
  const auto engine = Create(2);
  FakeBatch batch;
  batch.batch.num_rows = 9;

  batch.Start(*engine);

  EXPECT_TRUE(absl::IsInvalidArgument(batch.Wait())) << batch.status;
  EXPECT_TRUE(devices_.enqueued.empty());
  EXPECT_TRUE(engine->healthy());
}

TEST_F(ShardedEngineTest, AnAgreedShortageOfMemoryLeavesTheEngineUsable) {
  const auto engine = Create(2);
  devices_.agreed = absl::ResourceExhaustedError("no memory");
  FakeBatch failed;
  FakeBatch later;

  failed.Start(*engine);
  failed.Wait();
  devices_.agreed = absl::OkStatus();
  later.Start(*engine);

  EXPECT_EQ(failed.status, absl::ResourceExhaustedError("no memory"));
  EXPECT_TRUE(later.Wait().ok()) << later.status;
  EXPECT_TRUE(engine->healthy());
}

// Rank 0 still reads the caller's rows, whose memory the answer gives back.
TEST_F(ShardedEngineTest, AnswersAFailedBatchOnlyWhenNoShardReadsItAnyMore) {
  const auto engine = Create(2);
  devices_.agreed = absl::ResourceExhaustedError("no memory");
  devices_.held_polls = 3;
  FakeBatch failed;

  failed.Start(*engine);

  EXPECT_EQ(failed.Wait(), absl::ResourceExhaustedError("no memory"));
  EXPECT_EQ(devices_.held_polls, 0);
  EXPECT_TRUE(engine->healthy());
}

TEST_F(ShardedEngineTest, ADeviceErrorAfterAShortageOfMemoryMakesTheEngineUnhealthy) {
  const auto engine = Create(2);
  devices_.agreed = absl::ResourceExhaustedError("no memory");
  devices_.device = absl::InternalError("illegal address");
  FakeBatch failed;

  failed.Start(*engine);

  EXPECT_EQ(failed.Wait(), absl::InternalError("illegal address"));
  EXPECT_FALSE(engine->healthy());
}

// E77: a sticky device error fails the batches in flight and all later ones.
TEST_F(ShardedEngineTest, ADeviceErrorFailsBatchesInFlightAndLaterBatches) {
  for (const int32_t num_shards : {2, 4}) {
    const auto engine = Create(num_shards);
    Hold(true);
    FakeBatch first;
    FakeBatch second;
    FakeBatch later;
    first.Start(*engine);
    second.Start(*engine);

    {
      const absl::MutexLock lock(&devices_.mutex);
      devices_.device = absl::InternalError("illegal address");
    }
    first.Wait();
    second.Wait();
    later.Start(*engine);
    later.Wait();

    EXPECT_EQ(first.status, absl::InternalError("illegal address"));
    EXPECT_FALSE(second.status.ok());
    EXPECT_TRUE(absl::IsUnavailable(later.status)) << later.status;
    EXPECT_FALSE(engine->healthy());
    devices_.device = absl::OkStatus();
    Hold(false);
  }
}

// E78: the watchdog stops waiting for a kernel that hangs, with one shard and with several.
TEST_F(ShardedEngineTest, ABatchThatTakesTooLongMakesTheEngineUnhealthy) {
  for (const int32_t num_shards : {1, 2}) {
    const auto engine = Create(num_shards);
    Hold(true);
    FakeBatch batch;
    batch.Start(*engine);

    clock_.Advance(absl::Seconds(31));

    EXPECT_TRUE(absl::IsUnavailable(batch.Wait())) << batch.status;
    EXPECT_FALSE(engine->healthy());
    Hold(false);
  }
}

TEST_F(ShardedEngineTest, CountsADeviceErrorOnceForEachGpuOfTheReplica) {
  const auto engine = Create(2);
  devices_.device = absl::InternalError("fell off the bus");
  FakeBatch failed;
  FakeBatch later;

  failed.Start(*engine);
  failed.Wait();
  later.Start(*engine);
  later.Wait();

  EXPECT_THAT(AreCounted("logprobd_gpu_errors_total", "kind=\"cuda\"", 1), ElementsAre(true, true));
}

// E80: whichever call is the first to notice that a GPU has gone.
TEST_F(ShardedEngineTest, AGpuThatIsLostAtAnyStepFailsTheReplicaAndIsCountedOnce) {
  const absl::Status lost = absl::InternalError("fell off the bus");
  for (absl::Status Devices::*step : {&Devices::agreed, &Devices::device, &Devices::copied}) {
    Metrics metrics({.heads = {"default"}, .version = "1", .commit = "a", .gpus = {0, 1}});
    metrics_ = &metrics;
    const auto engine = Create(2);
    FakeBatch good;
    FakeBatch failed;
    FakeBatch later;
    good.Start(*engine);
    ASSERT_TRUE(good.Wait().ok()) << good.status;

    devices_.*step = lost;
    failed.Start(*engine);
    failed.Wait();
    devices_.*step = absl::OkStatus();  // a GPU that comes back is not trusted
    later.Start(*engine);

    EXPECT_EQ(failed.status, lost);
    EXPECT_TRUE(absl::IsUnavailable(later.Wait())) << later.status;
    EXPECT_FALSE(engine->healthy());
    EXPECT_THAT(AreCounted("logprobd_gpu_errors_total", "kind=\"cuda\"", 1),
                ElementsAre(true, true));
  }
}

TEST_F(ShardedEngineTest, CountsAShortageOfMemoryOnceForEachGpuOfTheReplica) {
  const auto engine = Create(2);
  devices_.agreed = absl::ResourceExhaustedError("no memory");
  FakeBatch failed;

  failed.Start(*engine);
  failed.Wait();

  EXPECT_THAT(AreCounted("logprobd_gpu_errors_total", "kind=\"out_of_memory\"", 1),
              ElementsAre(true, true));
}

TEST_F(ShardedEngineTest, CountsAHungReplicaAsATimeoutOfItsExchange) {
  const auto engine = Create(2);
  Hold(true);
  FakeBatch batch;
  batch.Start(*engine);

  clock_.Advance(absl::Seconds(31));
  batch.Wait();

  EXPECT_THAT(AreCounted("logprobd_collective_errors_total", "kind=\"timeout\"", 1),
              ElementsAre(true, true));
}

TEST_F(ShardedEngineTest, CountsABrokenExchangeByItsName) {
  const auto engine = Create(2);
  devices_.device = CollectiveError("nccl", "a link broke");
  FakeBatch failed;

  failed.Start(*engine);
  failed.Wait();

  EXPECT_THAT(AreCounted("logprobd_collective_errors_total", "kind=\"nccl\"", 1),
              ElementsAre(true, true));
  EXPECT_THAT(AreCounted("logprobd_gpu_errors_total", "kind=\"cuda\"", 0), ElementsAre(true, true));
}

// Regression: a device call that never returned kept all later batches from being answered.
TEST_F(ShardedEngineTest, AnswersAllBatchesWhenAShardIsStuckInEnqueue) {
  const auto engine = Create(2);
  SetStuck(&Devices::is_stuck, true);
  FakeBatch first;
  FakeBatch second;
  first.Start(*engine);
  second.Start(*engine);

  clock_.Advance(absl::Seconds(30));

  EXPECT_TRUE(absl::IsUnavailable(first.Wait())) << first.status;
  EXPECT_TRUE(absl::IsUnavailable(second.Wait())) << second.status;
  EXPECT_FALSE(engine->healthy());
  SetStuck(&Devices::is_stuck, false);
}

// E112: the finish thread cannot enforce the engine's own limit while a call to a driver does not
// return. Its heartbeat tells the watchdog where it stands.
TEST_F(ShardedEngineTest, AThreadInACallThatDoesNotReturnIsAtWorkAndDoesNotMove) {
  const auto engine = Create(2);
  SetStuck(&Devices::is_query_stuck, true);
  FakeBatch batch;
  batch.Start(*engine);
  AwaitStuck();
  const std::shared_ptr<const Heartbeat> finish = HeartbeatsOf("engine-finish").front();
  const int64_t beats = finish->beats();

  clock_.Advance(absl::Seconds(31));

  EXPECT_TRUE(finish->is_at_work());
  EXPECT_EQ(finish->beats(), beats);
  EXPECT_EQ(finish->shard(), 1);
  EXPECT_EQ(finish->owner().head, "chat");
  EXPECT_EQ(finish->owner().replica, 0);
  EXPECT_TRUE(engine->healthy());
  SetStuck(&Devices::is_query_stuck, false);
  batch.Wait();
}

TEST_F(ShardedEngineTest, ARankIsAtWorkUntilItsBatchIsAnswered) {
  const auto engine = Create(2);
  SetStuck(&Devices::is_stuck, true);
  FakeBatch batch;
  batch.Start(*engine);
  AwaitStuck();
  const auto ranks = HeartbeatsOf("engine-rank");
  ASSERT_EQ(ranks.size(), 2U);
  EXPECT_TRUE(ranks[1]->is_at_work());
  EXPECT_EQ(ranks[1]->shard(), 1);

  clock_.Advance(absl::Seconds(30));
  batch.Wait();

  EXPECT_FALSE(ranks[0]->is_at_work());
  EXPECT_FALSE(ranks[1]->is_at_work());
  SetStuck(&Devices::is_stuck, false);
}

TEST_F(ShardedEngineTest, IsAtWorkOnlyWhileItHasABatch) {
  const auto engine = Create(2);
  const auto heartbeats = heartbeats_.All();
  ASSERT_EQ(heartbeats.size(), 3U);  // two ranks and the finish thread
  FakeBatch batch;

  batch.Start(*engine);
  ASSERT_TRUE(batch.Wait().ok()) << batch.status;
  clock_.WaitUntilAsleep();

  for (const std::shared_ptr<const Heartbeat>& heartbeat : heartbeats) {
    EXPECT_FALSE(heartbeat->is_at_work()) << heartbeat->owner().thread;
    EXPECT_GT(heartbeat->beats(), 0) << heartbeat->owner().thread;
  }
}

TEST_F(ShardedEngineTest, WaitsForABatchThatIsWithinItsTime) {
  const auto engine = Create(2);
  Hold(true);
  FakeBatch batch;
  batch.Start(*engine);

  clock_.Advance(absl::Seconds(29));
  Hold(false);

  EXPECT_TRUE(batch.Wait().ok()) << batch.status;
  EXPECT_TRUE(engine->healthy());
}

}  // namespace
}  // namespace logprobd
