#include "server/engine/sharded_engine.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "kernels/common/tile.h"
#include "kernels/cpu/thread_pool.h"
#include "server/base/clock.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/base/log.h"

namespace logprobd {
namespace {

/// How long the finish thread polls the shards before it sleeps between polls: waking up takes as
/// long as a small batch.
constexpr absl::Duration kBusyPoll = absl::Milliseconds(2);
constexpr absl::Duration kPause = absl::Microseconds(50);

/// How often the finish thread checks a batch that is still being enqueued.
constexpr absl::Duration kWatchPeriod = absl::Milliseconds(250);

/// Returns the time for polls and pauses. It is real time even when the engine's clock is a fake.
absl::Time RealNow() { return Clock::Steady().Now(); }

/// True if only the batch has failed and the shards can score the next one.
bool FailsOnlyTheBatch(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsInvalidArgument(status);
}

/// Returns INVALID_ARGUMENT if the engine's buffers are too small for the batch. Only that batch
/// fails.
absl::Status CheckBatchFits(const ScoreBatch& batch, int64_t batch_rows_max, int32_t top_k_max) {
  if (batch.num_rows >= 1 && batch.num_rows <= batch_rows_max && batch.top_k >= 0 &&
      batch.top_k <= top_k_max) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "the batch has ", batch.num_rows, " rows and top-k ", batch.top_k, "; the engine takes 1 to ",
      batch_rows_max, " rows and top-k up to ", top_k_max));
}

class ShardedEngine final : public ScoringEngine {
 public:
  ShardedEngine(ShardedEngineOptions options, std::vector<std::unique_ptr<EngineShard>> shards,
                std::unique_ptr<Collective> collective)
      : options_(std::move(options)),
        clock_(*options_.clock),
        shards_(std::move(shards)),
        team_(static_cast<int32_t>(shards_.size()), std::move(collective)),
        rank_threads_(static_cast<int32_t>(shards_.size())),
        finish_heartbeat_(MakeHeartbeat("engine-finish")) {
    for (const std::unique_ptr<EngineShard>& shard : shards_) {
      rank_heartbeats_.push_back(MakeHeartbeat("engine-rank"));
      shard->SetHeartbeat(rank_heartbeats_.back());
    }
  }

  ~ShardedEngine() override {
    {
      const absl::MutexLock lock(&mutex_);
      is_stopping_ = true;
    }
    if (submit_thread_.joinable()) submit_thread_.join();
    if (finish_thread_.joinable()) finish_thread_.join();
    AwaitRest();
  }

  /// Call once, before the first batch.
  absl::Status StartThreads() {
    LOGPROBD_ASSIGN_OR_RETURN(submit_thread_,
                              StartThread("engine-submit", [this] { RunSubmitThread(); }));
    LOGPROBD_ASSIGN_OR_RETURN(finish_thread_,
                              StartThread("engine-finish", [this] { RunFinishThread(); }));
    return absl::OkStatus();
  }

  const HeadInfo& info() const override { return options_.info; }
  int64_t batch_rows_max() const override { return options_.batch_rows_max; }
  MemoryPlan memory() const override { return options_.memory; }
  bool reads_in_place() const override { return shards_.front()->reads_in_place(); }
  int64_t row_step(int64_t num_rows) const override { return shards_.front()->row_step(num_rows); }
  bool healthy() const override { return is_healthy_.load(std::memory_order_acquire); }

  absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t size_bytes) override {
    return shards_.front()->AllocateStaging(size_bytes);
  }

  void Start(ScoreBatch& batch, ScoreDone done) override {
    const absl::MutexLock lock(&mutex_);
    LOGPROBD_CHECK(jobs_.size() < kBatchesInFlight);
    jobs_.push_back(std::make_shared<Job>());
    jobs_.back()->batch = &batch;
    jobs_.back()->done = std::move(done);
    jobs_.back()->slot = next_slot_;
    jobs_.back()->deadline = clock_.Now() + options_.batch_time_max;
    next_slot_ = (next_slot_ + 1) % kBatchesInFlight;
    num_started_.fetch_add(1, std::memory_order_release);
    finish_heartbeat_->Begin();
  }

 private:
  /// A batch between Start and `done`.
  struct Job {
    ScoreBatch* batch = nullptr;
    ScoreDone done = {};
    int32_t slot = 0;
    absl::Time deadline;
    // mutex_ guards the members below.
    bool is_taken = false;     ///< The submit thread has taken it.
    bool is_enqueued = false;  ///< Every shard has enqueued it.
    absl::Status status = {};  ///< Result of enqueuing.
  };
  using JobPointer = std::shared_ptr<Job>;

  std::shared_ptr<Heartbeat> MakeHeartbeat(absl::string_view thread) const {
    return AddHeartbeat(options_.heartbeats,
                        {std::string(thread), options_.info.name, options_.replica});
  }

  // The submit thread.
  void RunSubmitThread();
  JobPointer NextToSubmit();
  absl::Status Enqueue(Job& job);

  bool AreShardsIdle() const;
  void AwaitRest() const;

  // The finish thread.
  void RunFinishThread();
  JobPointer NextToFinish();
  absl::Status Finish(Job& job);
  absl::Status AwaitShards(const Job& job);
  absl::Status Collect(Job& job);
  void Fail(const absl::Status& status);
  void RecordFailure(const absl::Status& status);
  absl::Status TimedOut() const;

  bool HasJobToSubmit() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_stopping_ || (!jobs_.empty() && !jobs_.back()->is_taken);
  }
  bool HasJobToFinish() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return jobs_.empty() ? is_stopping_ : jobs_.front()->is_enqueued;
  }

  const ShardedEngineOptions options_;
  const Clock& clock_;
  const std::vector<std::unique_ptr<EngineShard>> shards_;
  RankTeam team_;
  kernels::ThreadPool rank_threads_;                         ///< Used by the submit thread.
  std::vector<std::shared_ptr<Heartbeat>> rank_heartbeats_;  ///< One per shard.
  const std::shared_ptr<Heartbeat> finish_heartbeat_;
  std::atomic<bool> is_healthy_ = true;
  std::atomic<int64_t> num_started_ = 0;  ///< Number of batches; the submit thread polls it.
  int64_t num_taken_ = 0;                 ///< Used by the submit thread only.

  absl::Mutex mutex_;
  std::deque<JobPointer> jobs_ ABSL_GUARDED_BY(mutex_);  ///< Started batches, oldest first.
  int32_t next_slot_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread submit_thread_;
  std::thread finish_thread_;
};

void ShardedEngine::RunSubmitThread() {
  while (const JobPointer job = NextToSubmit()) {
    absl::Status status =
        healthy() ? CheckBatchFits(*job->batch, options_.batch_rows_max, options_.top_k_max)
                  : absl::UnavailableError("this replica of the head has failed");
    if (status.ok()) status = Enqueue(*job);
    const absl::MutexLock lock(&mutex_);
    job->status = std::move(status);
    job->is_enqueued = true;
  }
}

/// Waits for the oldest batch that is not taken and returns it. Returns null when the engine stops
/// and no batch is left.
ShardedEngine::JobPointer ShardedEngine::NextToSubmit() {
  const absl::Time sleep_from = RealNow() + options_.busy_poll;
  while (num_started_.load(std::memory_order_acquire) == num_taken_ && RealNow() < sleep_from) {
    std::this_thread::yield();
  }
  const absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &ShardedEngine::HasJobToSubmit));
  for (const JobPointer& job : jobs_) {
    if (!job->is_taken) {
      job->is_taken = true;
      ++num_taken_;
      return job;
    }
  }
  return nullptr;
}

absl::Status ShardedEngine::Enqueue(Job& job) {
  std::vector<absl::Status> statuses(shards_.size());
  // There are as many threads as shards, so that all shards run while one waits for the others.
  rank_threads_.ForEach(team_.size(), [&](int64_t rank, int32_t /*thread*/) {
    const auto i = static_cast<size_t>(rank);
    rank_heartbeats_[i]->Begin(static_cast<int32_t>(rank));
    statuses[i] = shards_[i]->Enqueue(*job.batch, job.slot, team_);
    rank_heartbeats_[i]->End();
  });
  for (const absl::Status& status : statuses) {
    LOGPROBD_RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

void ShardedEngine::RunFinishThread() {
  while (const JobPointer job = NextToFinish()) {
    absl::Status status = Finish(*job);
    finish_heartbeat_->Begin();
    ScoreDone done = std::move(job->done);
    {
      const absl::MutexLock lock(&mutex_);
      jobs_.pop_front();
    }
    std::move(done)(std::move(status));
  }
}

/// Waits until the oldest batch is enqueued or its deadline has passed and returns it. Returns null
/// when the engine stops and no batch is left.
ShardedEngine::JobPointer ShardedEngine::NextToFinish() {
  const absl::MutexLock lock(&mutex_);
  while (true) {
    const absl::Time now = clock_.Now();
    if (!jobs_.empty() && (jobs_.front()->is_enqueued || jobs_.front()->deadline <= now)) {
      return jobs_.front();
    }
    if (jobs_.empty()) {
      finish_heartbeat_->End();
      if (is_stopping_) return nullptr;
    } else if (jobs_.front()->is_taken) {
      finish_heartbeat_
          ->Begin();  // whether the batch moves is shown by the heartbeats of the ranks
    }
    clock_.AwaitUntil(mutex_, absl::Condition(this, &ShardedEngine::HasJobToFinish),
                      now + kWatchPeriod);
  }
}

absl::Status ShardedEngine::Finish(Job& job) {
  absl::Status status;
  {
    const absl::MutexLock lock(&mutex_);
    status = job.is_enqueued ? job.status : team_.aborted();
    if (!job.is_enqueued) status.Update(TimedOut());
  }
  if (status.ok()) status = AwaitShards(job);
  if (status.ok()) status = Collect(job);
  if (status.ok()) return status;
  RecordFailure(status);
  if (FailsOnlyTheBatch(status)) {
    // Work that was enqueued before the failure still reads the caller's memory.
    const absl::Status rest = AwaitShards(job);
    if (rest.ok()) return status;
    status = rest;
  }
  if (healthy()) Fail(status);
  return status;
}

absl::Status ShardedEngine::AwaitShards(const Job& job) {
  const absl::Time sleep_from = RealNow() + kBusyPoll;
  while (true) {
    bool is_done = true;
    for (size_t rank = 0; rank < shards_.size(); ++rank) {
      finish_heartbeat_->Begin(static_cast<int32_t>(rank));
      LOGPROBD_ASSIGN_OR_RETURN(const bool is_shard_done, shards_[rank]->IsDone(job.slot));
      is_done = is_done && is_shard_done;
    }
    // Aborted work also ends, but without scores.
    LOGPROBD_RETURN_IF_ERROR(team_.aborted());
    if (team_.size() > 1) {
      LOGPROBD_RETURN_IF_ERROR(team_.collective().Check());
    }
    if (is_done) return absl::OkStatus();
    if (clock_.Now() >= job.deadline) return TimedOut();
    if (RealNow() < sleep_from) {
      std::this_thread::yield();
    } else {
      absl::SleepFor(kPause);
    }
  }
}

absl::Status ShardedEngine::Collect(Job& job) {
  ScoreBatch& batch = *job.batch;
  batch.h2d_seconds = batch.kernel_seconds = batch.combine_seconds = batch.d2h_seconds = 0;
  batch.gather_seconds = 0;
  for (size_t rank = 0; rank < shards_.size(); ++rank) {
    finish_heartbeat_->Begin(static_cast<int32_t>(rank));
    LOGPROBD_ASSIGN_OR_RETURN(const ShardTimes times, shards_[rank]->Collect(batch, job.slot));
    // The batch gets the times of the slowest shard. The times of combine and of the copy to the
    // host are those of the first shard, which writes the scores.
    batch.h2d_seconds = std::max(batch.h2d_seconds, times.h2d);
    batch.gather_seconds = std::max(batch.gather_seconds, times.gather);
    batch.kernel_seconds = std::max(batch.kernel_seconds, times.kernel);
    if (rank == 0) {
      batch.combine_seconds = times.combine;
      batch.d2h_seconds = times.d2h;
    }
    if (options_.metrics != nullptr && rank < options_.gpus.size()) {
      const int64_t end =
          std::min(options_.tiles[rank].end * kernels::kTileColumns, options_.info.vocab_size);
      const int64_t columns = end - options_.tiles[rank].begin * kernels::kTileColumns;
      const double flops = 2.0 * static_cast<double>(batch.num_rows) *
                           static_cast<double>(columns) *
                           static_cast<double>(options_.info.hidden_size);
      options_.metrics->RecordFlops(options_.gpus[rank], flops, times.kernel + times.combine);
    }
  }
  return absl::OkStatus();
}

/// Makes the engine unhealthy and waits until the batches in flight no longer touch their memory,
/// but for at most rest_time_max.
void ShardedEngine::Fail(const absl::Status& status) {
  is_healthy_.store(false, std::memory_order_release);
  LogError(
      "a replica of the head has failed",
      {{"head", options_.info.name}, {"replica", options_.replica}, {"error", status.message()}});
  team_.Abort(status);
  const absl::Time until = RealNow() + options_.rest_time_max;
  const auto is_idle = [&] {
    {
      const absl::MutexLock lock(&mutex_);
      const auto is_enqueuing = [](const JobPointer& job) {
        return job->is_taken && !job->is_enqueued;
      };
      if (std::any_of(jobs_.begin(), jobs_.end(), is_enqueuing)) return false;
    }
    return AreShardsIdle();
  };
  while (!is_idle() && RealNow() < until) {
    finish_heartbeat_->Beat();
    absl::SleepFor(kPause);
  }
  // Batches that are stuck in a call that never returns are answered as well. The engine gets no
  // further work, so that a rank that is still stuck then holds up nobody.
  for (const std::shared_ptr<Heartbeat>& rank : rank_heartbeats_) rank->End();
  const absl::MutexLock lock(&mutex_);
  for (const JobPointer& job : jobs_) {
    if (job->is_enqueued) continue;
    job->is_taken = true;
    job->deadline = clock_.Now();
  }
}

/// Runs on the finish thread or, once that has ended, in the destructor.
bool ShardedEngine::AreShardsIdle() const {
  for (size_t rank = 0; rank < shards_.size(); ++rank) {
    finish_heartbeat_->Begin(static_cast<int32_t>(rank));
    if (!shards_[rank]->IsIdle()) return false;
  }
  return true;
}

/// Waits for work that still runs after a failure, because it writes to memory that is about to be
/// freed. If a device never ends its work, the destructor blocks.
void ShardedEngine::AwaitRest() const {
  if (!AreShardsIdle()) {
    LogWarning("the failed replica is released when its devices have ended their work",
               {{"head", options_.info.name}, {"replica", options_.replica}});
    while (!AreShardsIdle()) absl::SleepFor(kPause);
  }
  finish_heartbeat_->End();  // also where the finish thread has waited for the shards
}

/// Counts the failure for every GPU, since not all shards know which one failed.
void ShardedEngine::RecordFailure(const absl::Status& status) {
  if (options_.metrics == nullptr || absl::IsInvalidArgument(status) || !healthy()) return;
  const std::optional<std::string> collective = CollectiveOf(status);
  for (const int32_t gpu : options_.gpus) {
    if (collective.has_value()) {
      options_.metrics->RecordCollectiveError(gpu, *collective);
    } else if (absl::IsUnavailable(status) && team_.size() > 1) {
      options_.metrics->RecordCollectiveError(gpu, "timeout");
    } else {
      options_.metrics->RecordGpuError(
          gpu, absl::IsResourceExhausted(status) ? "out_of_memory" : "cuda");
    }
  }
}

absl::Status ShardedEngine::TimedOut() const {
  return absl::UnavailableError(absl::StrCat("the batch was not scored within ",
                                             absl::FormatDuration(options_.batch_time_max),
                                             ": the replica counts as hung"));
}

}  // namespace

ShardedEngineOptions ReplicaOptions(const HeadInfo& info, const EnginePlan& plan,
                                    const EngineOptions& options, int32_t replica) {
  ShardedEngineOptions engine;
  engine.info = info;
  engine.info.engine = plan.engine;
  engine.info.engine_reason = plan.reason;
  engine.info.layout = plan.layout;
  engine.batch_rows_max = options.batch_rows_max;
  engine.top_k_max = options.top_k_max;
  engine.batch_time_max = options.batch_time_max;
  engine.replica = replica;
  engine.clock = options.clock;
  engine.heartbeats = options.heartbeats;
  engine.metrics = options.metrics;
  return engine;
}

absl::StatusOr<std::unique_ptr<ScoringEngine>> CreateShardedEngine(
    ShardedEngineOptions options, std::vector<std::unique_ptr<EngineShard>> shards,
    std::unique_ptr<Collective> collective) {
  LOGPROBD_CHECK(!shards.empty() && shards.size() == options.tiles.size());
  LOGPROBD_CHECK(shards.size() == 1 || collective != nullptr);
  try {
    auto engine = std::make_unique<ShardedEngine>(std::move(options), std::move(shards),
                                                  std::move(collective));
    LOGPROBD_RETURN_IF_ERROR(engine->StartThreads());
    return engine;
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the threads of the shards cannot be started: ", error.what()));
  }
}

}  // namespace logprobd
