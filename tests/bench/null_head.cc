#include "tests/bench/null_head.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/base/scoring_engine.h"
#include "server/batching/batcher.h"

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

/// Answers each batch from a thread of its own, as every engine does, without looking at it.
class NullEngine final : public ScoringEngine {
 public:
  NullEngine() : thread_([this] { Run(); }) {
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

  void Start(ScoreBatch& batch, ScoreDone done) override {
    std::fill(batch.nonfinite.begin(), batch.nonfinite.end(), uint8_t{0});
    std::fill(batch.logprob.begin(), batch.logprob.end(), 0.0F);
    std::fill(batch.entropy.begin(), batch.entropy.end(), 0.0F);
    absl::MutexLock lock(&mutex_);
    started_.push_back(std::move(done));
  }

 private:
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_stopping_ || !started_.empty();
  }

  void Run() {
    while (true) {
      ScoreDone done;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(this, &NullEngine::HasWork));
        if (started_.empty()) return;
        done = std::move(started_.front());
        started_.pop_front();
      }
      std::move(done)(absl::OkStatus());
    }
  }

  HeadInfo info_;
  absl::Mutex mutex_;
  std::deque<ScoreDone> started_ ABSL_GUARDED_BY(mutex_);
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

class NullHead final : public ServedHead {
 public:
  static absl::StatusOr<std::shared_ptr<ServedHead>> Create(const Clock& clock, Metrics& metrics) {
    auto head = std::make_shared<NullHead>();
    absl::StatusOr<std::unique_ptr<Batcher>> batcher = Batcher::Create(
        {.client_share_max = 1.0, .head = "null"}, {&head->engine_}, clock, metrics);
    if (!batcher.ok()) return batcher.status();
    head->batcher_ = *std::move(batcher);
    return head;
  }

  const HeadInfo& info() const override { return engine_.info(); }
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

absl::StatusOr<std::shared_ptr<ServedHead>> MakeNullHead(const Clock& clock, Metrics& metrics) {
  return NullHead::Create(clock, metrics);
}

}  // namespace logprobd::testing
