#include "server/transport/score_calls.h"

#include <atomic>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "server/transport/call_info.h"
#include "server/transport/grpc_status.h"

namespace logprobd {
namespace {

/// gRPC calls OnCancel and OnDone only after StartScoreCall has returned, and it calls OnDone last.
/// `this` lives at least until Finish.
class ScoreUnary final : public grpc::ServerUnaryReactor {
 public:
  ScoreUnary(ScoreHandler& handler, grpc::CallbackServerContext& context,
             grpc::ByteBuffer& response)
      : handler_(handler), context_(context), response_(response) {
    handler_.work().Begin();
  }

  void Start(const grpc::ByteBuffer& request) {
    submission_ = handler_.Start(request, CallInfoOf(context_, handler_.access(), handler_.clock()),
                                 Metrics::Method::kScore,
                                 [this](ScoreReply reply) { Reply(std::move(reply)); });
  }

  void OnCancel() override {
    is_cancelled_ = true;
    if (submission_.has_value()) submission_->Cancel();
  }

  void OnDone() override {
    handler_.unread().End(unread_);
    handler_.RecordReplied(answered_, is_cancelled_ ? 0 : answer_bytes_, transport_);
    hold_.Release();
    handler_.work().End();
    delete this;
  }

 private:
  void Reply(ScoreReply reply) {
    answered_ = handler_.clock().Now();
    transport_ = reply.transport;
    if (!reply.status.ok()) {
      AddRetryHint(reply.status, context_);
      Finish(ToGrpcStatus(reply.status));
      return;
    }
    hold_ = std::move(reply.hold);
    grpc::ByteBuffer message = EncodeScoreReply(std::move(reply));
    response_.Swap(&message);  // a ByteBuffer cannot be moved
    answer_bytes_ = static_cast<int64_t>(response_.Length());
    unread_ = handler_.unread().Begin(answer_bytes_, [this] { context_.TryCancel(); });
    Finish(grpc::Status::OK);
  }

  ScoreHandler& handler_;
  grpc::CallbackServerContext& context_;
  grpc::ByteBuffer& response_;
  std::optional<Submission> submission_;
  absl::Time answered_;
  int64_t answer_bytes_ = 0;
  uint64_t unread_ = 0;  ///< See UnreadAnswers.
  Metrics::Transport transport_ = Metrics::Transport::kTcp;
  AnswerBudget::Hold hold_;
  std::atomic<bool> is_cancelled_ = false;
};

/// A chunk occupies one of `window_` slots from its read until its response has been written. At
/// most one read and one write are in progress. Advance decides the next actions while it holds the
/// lock, and Do performs them after the lock is released.
///
/// Lifetime: Finish is called when no read, write or chunk is left. A thread does not touch `this`
/// after Do, because gRPC may then call OnDone.
class ScoreStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  ScoreStream(ScoreHandler& handler, grpc::CallbackServerContext& context, int window)
      : handler_(handler),
        context_(context),
        info_(CallInfoOf(context, handler.access(), handler.clock())),
        window_(window) {}

  void Start() { Do(Advance()); }

  void OnReadDone(bool ok) override {
    if (!ok) {
      absl::ReleasableMutexLock lock(&mutex_);
      is_reading_ = false;
      reads_ended_ = true;
      const Next next = AdvanceLocked();
      lock.Release();
      Do(next);
      return;
    }
    Do(TakeChunk());
  }

  void OnWriteDone(bool ok) override {
    handler_.unread().End(unread_);
    handler_.RecordReplied(writing_answered_, ok ? writing_bytes_ : 0, writing_transport_);
    writing_hold_.Release();
    absl::ReleasableMutexLock lock(&mutex_);
    is_writing_ = false;
    ReleaseSlot();
    is_broken_ = is_broken_ || !ok;
    const Next next = AdvanceLocked();
    lock.Release();
    Do(next);
  }

  void OnCancel() override {
    std::vector<Submission> submissions;
    {
      const absl::MutexLock lock(&mutex_);
      is_broken_ = true;
      for (auto& [slot, submission] : open_) {
        if (submission.has_value()) submissions.push_back(*submission);
      }
    }
    for (const Submission& submission : submissions) {
      submission.Cancel();  // leads to a call of Answered, perhaps on another thread
    }
    Do(Advance());
  }

  void OnDone() override { delete this; }

 private:
  struct Answer {
    grpc::ByteBuffer message;
    absl::Time answered;
    Metrics::Transport transport = Metrics::Transport::kTcp;
    AnswerBudget::Hold hold;
  };

  /// The actions to perform after the lock is released. If `finish` is true, the others are false.
  struct Next {
    bool read = false;
    bool write = false;
    bool finish = false;
  };

  Next TakeChunk() {
    uint64_t slot = 0;
    grpc::ByteBuffer message;
    {
      const absl::MutexLock lock(&mutex_);
      is_reading_ = false;
      message.Swap(&incoming_);
      if (is_broken_) return AdvanceLocked();
      slot = next_slot_++;
      open_[slot] = std::nullopt;
      ++held_;
      handler_.work().Begin();
    }
    std::optional<Submission> submission =
        handler_.Start(message, info_, Metrics::Method::kScoreStream,
                       [this, slot](ScoreReply reply) { Answered(slot, std::move(reply)); });
    absl::ReleasableMutexLock lock(&mutex_);
    const auto open = open_.find(slot);
    if (submission.has_value() && open != open_.end()) {
      if (is_broken_) {  // cancelled between the two locks
        lock.Release();
        submission->Cancel();
        return Advance();
      }
      open->second = std::move(submission);
    }
    return AdvanceLocked();
  }

  /// Queues the response to a chunk. May be called from any thread, also within TakeChunk or
  /// OnCancel.
  void Answered(uint64_t slot, ScoreReply reply) {
    const absl::Time now = handler_.clock().Now();
    AnswerBudget::Hold hold = std::move(reply.hold);
    const Metrics::Transport transport = reply.transport;
    grpc::ByteBuffer message = EncodeScoreReply(std::move(reply));
    absl::ReleasableMutexLock lock(&mutex_);
    open_.erase(slot);
    answers_.emplace_back();
    answers_.back().message.Swap(&message);  // a ByteBuffer cannot be moved
    answers_.back().answered = now;
    answers_.back().transport = transport;
    answers_.back().hold = std::move(hold);
    const Next next = AdvanceLocked();
    lock.Release();
    Do(next);
  }

  Next Advance() {
    const absl::MutexLock lock(&mutex_);
    return AdvanceLocked();
  }

  Next AdvanceLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Next next;
    while (is_broken_ && !answers_.empty()) {
      answers_.pop_front();
      ReleaseSlot();
    }
    if (!is_writing_ && !answers_.empty()) {
      outgoing_.Swap(&answers_.front().message);
      writing_answered_ = answers_.front().answered;
      writing_transport_ = answers_.front().transport;
      writing_bytes_ = static_cast<int64_t>(outgoing_.Length());
      writing_hold_ = std::move(answers_.front().hold);
      answers_.pop_front();
      next.write = is_writing_ = true;
    }
    const bool is_ending = reads_ended_ || is_broken_;
    if (!is_reading_ && !is_ending && held_ < window_) next.read = is_reading_ = true;
    if (is_ending && !is_reading_ && !is_writing_ && held_ == 0 && !is_finished_) {
      next.finish = is_finished_ = true;
    }
    return next;
  }

  void Do(Next next) {
    // A write and a read may both be due. The stream cannot end between them, because both count as
    // in progress.
    if (next.write) {
      unread_ = handler_.unread().Begin(writing_bytes_, [this] { context_.TryCancel(); });
      StartWrite(&outgoing_);
    }
    if (next.read) StartRead(&incoming_);
    if (next.finish) Finish(grpc::Status::OK);
  }

  void ReleaseSlot() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    --held_;
    handler_.work().End();
  }

  ScoreHandler& handler_;
  grpc::CallbackServerContext& context_;
  const CallInfo info_;
  const int window_;

  /// gRPC uses these buffers during a read or a write.
  grpc::ByteBuffer incoming_;
  grpc::ByteBuffer outgoing_;
  absl::Time writing_answered_;
  int64_t writing_bytes_ = 0;
  uint64_t unread_ = 0;  ///< Of the write; see UnreadAnswers.
  Metrics::Transport writing_transport_ = Metrics::Transport::kTcp;
  AnswerBudget::Hold writing_hold_;

  absl::Mutex mutex_;
  uint64_t next_slot_ ABSL_GUARDED_BY(mutex_) = 0;
  int held_ ABSL_GUARDED_BY(mutex_) =
      0;  ///< Number of chunks that were read and whose response is not yet written.
  /// The submissions of chunks without a response, by slot. A value is nullopt until its chunk is
  /// submitted.
  absl::flat_hash_map<uint64_t, std::optional<Submission>> open_ ABSL_GUARDED_BY(mutex_);
  std::deque<Answer> answers_ ABSL_GUARDED_BY(mutex_);
  bool is_reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool reads_ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_broken_ ABSL_GUARDED_BY(mutex_) = false;  ///< The call was cancelled, or a write failed.
  bool is_finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

grpc::ServerUnaryReactor* StartScoreCall(ScoreHandler& handler,
                                         grpc::CallbackServerContext& context,
                                         const grpc::ByteBuffer& request,
                                         grpc::ByteBuffer& response) {
  auto* call = new ScoreUnary(handler, context, response);
  call->Start(request);
  return call;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StartScoreStream(
    ScoreHandler& handler, grpc::CallbackServerContext& context, int window) {
  auto* stream = new ScoreStream(handler, context, window);
  stream->Start();
  return stream;
}

}  // namespace logprobd
