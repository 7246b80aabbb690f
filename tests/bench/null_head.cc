#include "tests/bench/null_head.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/base/scoring_engine.h"
#include "server/batching/batcher.h"
#include "server/batching/task_pool.h"
#include "tests/bench/row_checksum.h"

namespace logprobd::testing {
namespace {

class HeapBuffer final : public StagingBuffer {
 public:
  explicit HeapBuffer(int64_t size_bytes)
      : size_bytes_(size_bytes), memory_(new std::byte[static_cast<size_t>(size_bytes)]) {}
  std::byte* data() override { return memory_.get(); }
  int64_t size_bytes() const override { return size_bytes_; }

 private:
  const int64_t size_bytes_;
  const std::unique_ptr<std::byte[]> memory_;
};

constexpr int64_t kRowsOfTask = 32;  // 256 KiB

/// Answers each batch from a thread of its own, as every engine does, and only reads it if asked.
class NullEngine final : public ScoringEngine {
 public:
  explicit NullEngine(const NullHeadOptions& options)
      : reads_(options.reads),
        pool_("read", options.reads ? options.reading_threads : 0),
        thread_([this] { Run(); }) {
    info_.name = "null";
    info_.model_type = "null";
    info_.hidden_size = 4'096;
    info_.vocab_size = 151'936;
    info_.vocab_rows = 151'936;
    info_.engine = "null";
  }

  ~NullEngine() override {
    {
      absl::MutexLock lock(&mutex_);
      is_stopping_ = true;
    }
    thread_.join();
  }

  const HeadInfo& info() const override { return info_; }
  int64_t batch_rows_max() const override { return 8'192; }
  MemoryPlan memory() const override { return {}; }
  bool healthy() const override { return true; }

  absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t size_bytes) override {
    return std::make_unique<HeapBuffer>(size_bytes);
  }

  bool reads_in_place() const override { return reads_; }

  void Start(ScoreBatch& batch, ScoreDone done) override {
    std::fill(batch.nonfinite.begin(), batch.nonfinite.end(), uint8_t{0});
    std::fill(batch.logprob.begin(), batch.logprob.end(), 0.0F);
    std::fill(batch.entropy.begin(), batch.entropy.end(), 0.0F);
    absl::MutexLock lock(&mutex_);
    started_.push_back({&batch, std::move(done)});
  }

 private:
  struct Started {
    ScoreBatch* batch;
    ScoreDone done;
  };

  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_stopping_ || !started_.empty();
  }

  void Run() {
    while (true) {
      Started started;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(this, &NullEngine::HasWork));
        if (started_.empty()) return;
        started = std::move(started_.front());
        started_.pop_front();
      }
      if (reads_) Read(*started.batch);
      std::move(started.done)(absl::OkStatus());
    }
  }

  void Read(ScoreBatch& batch) {
    const auto row_bytes = static_cast<size_t>(info_.hidden_size) * 2;
    places_.clear();
    if (batch.runs.empty()) AddPlaces({.data = batch.hidden, .num_rows = batch.num_rows});
    for (const HiddenRun& run : batch.runs) AddPlaces(run);
    pool_.Run((batch.num_rows + kRowsOfTask - 1) / kRowsOfTask, [&](int64_t task) {
      const auto end = static_cast<size_t>(std::min((task + 1) * kRowsOfTask, batch.num_rows));
      for (auto row = static_cast<size_t>(task * kRowsOfTask); row < end; ++row) {
        batch.logprob[row] = RowChecksum({places_[row], row_bytes});
      }
    });
  }

  void AddPlaces(const HiddenRun& run) {
    for (int64_t row = 0; row < run.num_rows; ++row) {
      places_.push_back(run.data + row * info_.hidden_size * 2);
    }
  }

  HeadInfo info_;
  const bool reads_;
  std::vector<const std::byte*> places_;  // of the rows of the batch that is read
  TaskPool pool_;
  absl::Mutex mutex_;
  std::deque<Started> started_ ABSL_GUARDED_BY(mutex_);
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

class NullHead final : public ServedHead {
 public:
  explicit NullHead(const NullHeadOptions& options) : engine_(options) {}

  static absl::StatusOr<std::shared_ptr<ServedHead>> Create(const Clock& clock, Metrics& metrics,
                                                            const NullHeadOptions& options) {
    auto head = std::make_shared<NullHead>(options);
    absl::StatusOr<std::unique_ptr<Batcher>> batcher = Batcher::Create(
        {.client_share_max = 1.0, .head = "null"}, {&head->engine_}, clock, metrics);
    if (!batcher.ok()) return batcher.status();
    head->batcher_ = *std::move(batcher);
    return head;
  }

  std::shared_ptr<const HeadInfo> info() const override {
    return std::make_shared<const HeadInfo>(engine_.info());
  }
  bool ready() const override { return true; }
  absl::StatusOr<RequestTicket> Submit(ScoreRequest request, ScoreCallback done) override {
    return batcher_->Submit(std::move(request), std::move(done));
  }
  void Cancel(RequestTicket ticket) override { batcher_->Cancel(ticket); }
  void Verify(const VerifyOptions&, VerifyCallback done) override {
    std::move(done)(absl::UnimplementedError("the null head has no weight to verify"));
  }

 private:
  NullEngine engine_;
  std::unique_ptr<Batcher> batcher_;  // stops before its engine
};

}  // namespace

absl::StatusOr<std::shared_ptr<ServedHead>> MakeNullHead(const Clock& clock, Metrics& metrics,
                                                         const NullHeadOptions& options) {
  return NullHead::Create(clock, metrics, options);
}

}  // namespace logprobd::testing
