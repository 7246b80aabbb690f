#include "client/cpp/score_call.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/call_versions.h"
#include "client/cpp/chunk_messages.h"
#include "client/cpp/chunk_plan.h"
#include "client/cpp/policy.h"
#include "client/cpp/server_messages.h"

namespace logprobd::client {
namespace {

/// Delivers the result once the call has ended and gRPC has dropped every slice of the caller's
/// memory.
class Delivery {
 public:
  Delivery(RpcTransport& transport, ScoreCallback done)
      : transport_(transport), done_(std::move(done)) {}

  /// Returns a reference for a slice to own.
  static std::shared_ptr<void> Hold(const std::shared_ptr<Delivery>& delivery) {
    delivery->holds_.fetch_add(1, std::memory_order_relaxed);
    return {nullptr, [delivery](void*) { Drop(delivery, /*inside_grpc=*/true); }};
  }

  /// Sets the result and drops the call's own reference.
  static void Finish(const std::shared_ptr<Delivery>& delivery,
                     absl::StatusOr<ScoreResult> result) {
    delivery->result_ = std::move(result);
    Drop(delivery, /*inside_grpc=*/false);
  }

 private:
  static void Drop(const std::shared_ptr<Delivery>& delivery, bool inside_grpc) {
    if (delivery->holds_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const auto deliver = [delivery] { std::move(delivery->done_)(std::move(delivery->result_)); };
    // gRPC drops slices while it holds its own locks; the caller's code must not run there.
    if (inside_grpc) {
      delivery->transport_.After(absl::ZeroDuration(), nullptr, deliver);
    } else {
      deliver();
    }
  }

  RpcTransport& transport_;
  std::atomic<int64_t> holds_{1};
  ScoreCallback done_;
  absl::StatusOr<ScoreResult> result_ = absl::InternalError("not finished");
};

/// The rows of a call that used one transport.
struct TransportUse {
  int64_t rows = 0;
  std::string reason;
};

class ScoreCall : public std::enable_shared_from_this<ScoreCall> {
 public:
  ScoreCall(const CallEnvironment& environment, ScoreArgs args, const ScoreCallOptions& options,
            ScoreCallback done)
      : environment_(environment),
        args_(std::move(args)),
        options_(options),
        plan_(PlanChunks(args_, options.limits, options.request_bytes)),
        scope_(environment.transport->NewScope()),
        delivery_(std::make_shared<Delivery>(*environment.transport, std::move(done))),
        merger_(args_, plan_) {
    scope_->traceparent = args_.traceparent;
    scope_->versions = std::make_shared<CallVersions>(
        *environment.balance, CallVersions::Options{.head = args_.head,
                                                    .pinned = args_.weights_version,
                                                    .mix = environment.mix_weights_versions});
    // Several requests keep several gRPC threads busy, which a single caller's thread cannot match.
    if (plan_.chunks.size() == 1) scope_->queue = options_.queue;
    for (const Chunk& chunk : plan_.chunks) waiting_.push_back(&chunk);
  }

  /// Sends chunks while the windows have room.
  void SendMore() {
    while (true) {
      // CountServers runs without the lock: a check may end at once and then end a request of this
      // call.
      const int64_t window = options_.max_inflight * environment_.transport->CountServers();
      const Chunk* chunk = nullptr;
      {
        const absl::MutexLock lock(&mutex_);
        if (!status_.ok() || waiting_.empty()) return;
        if (inflight_ >= window) break;
        chunk = waiting_.front();
        waiting_.pop_front();
        ++inflight_;
      }
      Send(*chunk);
    }
    RecheckServersSoon();
  }

 private:
  /// Checks again soon whether more servers are ready, since responses may take long.
  void RecheckServersSoon() {
    if (environment_.balance->is_solo()) return;
    {
      const absl::MutexLock lock(&mutex_);
      if (is_recheck_scheduled_) return;
      is_recheck_scheduled_ = true;
    }
    environment_.transport->After(policy::kLookAgain, scope_, [self = shared_from_this()] {
      {
        const absl::MutexLock lock(&self->mutex_);
        self->is_recheck_scheduled_ = false;
      }
      self->SendMore();
    });
  }

  void Send(const Chunk& chunk) {
    auto self = shared_from_this();
    const int epoch = scope_->versions->epoch();
    auto placement = std::make_shared<Placement>();
    if (options_.local != nullptr) {
      absl::StatusOr<Placement> placed = options_.local->Place(args_, chunk);
      if (!placed.ok()) {
        Receive(chunk, *placement, epoch, {.status = placed.status()});
        return;
      }
      *placement = *std::move(placed);
    }
    auto request = [self, &chunk, placement] {
      if (placement->lease != nullptr) {
        return EncodeSliceRequest(self->args_, self->plan_, chunk, *placement);
      }
      return EncodeScoreRequest(self->args_, self->plan_, chunk, Delivery::Hold(self->delivery_));
    };
    StartRetryingCall(environment_,
                      {.method = kScoreMethod,
                       .request = std::move(request),
                       .deadline = options_.deadline,
                       .timeout = options_.timeout,
                       .scope = scope_},
                      [self, &chunk, placement, epoch](const CallOutcome& outcome) {
                        placement->slot.reset();  // freed before the next request needs a slot
                        self->ReceiveOrSendAgain(chunk, *placement, epoch, outcome);
                      });
  }

  void ReceiveOrSendAgain(const Chunk& chunk, const Placement& placement, int epoch,
                          const CallOutcome& outcome) {
    if (options_.local != nullptr && IsRunning() &&
        options_.local->Refused(placement, outcome.status)) {
      Send(chunk);
    } else {
      Receive(chunk, placement, epoch, outcome);
    }
  }

  bool IsRunning() {
    const absl::MutexLock lock(&mutex_);
    return status_.ok();
  }

  /// Merges a response. Returns false if another version of the weights than the call's scored it.
  absl::StatusOr<bool> Merge(const Chunk& chunk, const Placement& placement, int epoch,
                             const CallOutcome& outcome) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!outcome.status.ok()) {
      return WithRowRange(options_.local == nullptr
                              ? outcome.status
                              : options_.local->ErrorOf(placement, outcome.status),
                          chunk);
    }
    return merger_.Add(chunk, outcome.body, [&](uint64_t version) {
      return scope_->versions->Keeps(outcome.server, version, epoch);
    });
  }

  /// After all responses have arrived, queues the chunks that another version than the call's
  /// scored.
  void FindStale() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (environment_.mix_weights_versions) return;
    const std::vector<const Chunk*> stale = merger_.OtherThan(scope_->versions->kept());
    if (!stale.empty() && ++rounds_ >= policy::kSwapRoundsMax) {
      status_ = scope_->versions->Mismatch();
      return;
    }
    for (const Chunk* chunk : stale) {
      waiting_.push_back(chunk);
      rows_done_ -= chunk->rows();
    }
  }

  void Receive(const Chunk& chunk, const Placement& placement, int epoch,
               const CallOutcome& outcome) {
    bool is_last = false;
    bool has_failed = false;
    {
      const absl::MutexLock lock(&mutex_);
      --inflight_;
      retries_ += outcome.attempts - 1;
      if (status_.ok()) {
        const absl::StatusOr<bool> is_kept = Merge(chunk, placement, epoch, outcome);
        status_ = is_kept.status();
        has_failed = !status_.ok();
        if (!has_failed && *is_kept) {
          rows_done_ += chunk.rows();
          TransportUse& use = transport_uses_[placement.transport];
          use.rows += chunk.rows();
          use.reason = placement.reason;
          if (args_.on_progress) args_.on_progress(rows_done_);
        } else if (!has_failed) {
          waiting_.push_front(&chunk);
        }
        if (!has_failed && inflight_ == 0 && waiting_.empty()) FindStale();
      }
      is_last = inflight_ == 0 && (!status_.ok() || waiting_.empty());
    }
    if (has_failed) scope_->Cancel();
    if (is_last) {
      Finish();
    } else {
      SendMore();
    }
  }

  void Finish() {
    absl::StatusOr<ScoreResult> result;
    {
      const absl::MutexLock lock(&mutex_);
      if (status_.ok()) {
        result = merger_.Finish();
        result->retries = retries_;
        const auto& [transport, use] = *std::max_element(
            transport_uses_.begin(), transport_uses_.end(),
            [](const auto& a, const auto& b) { return a.second.rows < b.second.rows; });
        result->transport = transport;
        if (options_.local != nullptr) options_.local->Used(transport, use.reason);
      } else {
        result = status_;
      }
    }
    Delivery::Finish(delivery_, std::move(result));
  }

  /// Adds the chunk's row range to an error: the server counts the rows of a request from 0.
  absl::Status WithRowRange(const absl::Status& status, const Chunk& chunk) const {
    if (plan_.chunks.size() == 1) return status;
    return {status.code(), absl::StrCat(status.message(), " [in the request with rows ",
                                        chunk.row_begin, " to ", chunk.row_end - 1,
                                        " of this call; its row 0 is row ", chunk.row_begin, "]")};
  }

  const CallEnvironment& environment_;
  const ScoreArgs args_;  // its spans refer to the caller's memory
  const ScoreCallOptions options_;
  const ChunkPlan plan_;
  const std::shared_ptr<CancelScope> scope_;
  const std::shared_ptr<Delivery> delivery_;

  absl::Mutex mutex_;
  ResultMerger merger_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::deque<const Chunk*> waiting_ ABSL_GUARDED_BY(mutex_);
  int rounds_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_recheck_scheduled_ ABSL_GUARDED_BY(mutex_) = false;
  int32_t inflight_ ABSL_GUARDED_BY(mutex_) = 0;
  int32_t retries_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t rows_done_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<Transport, TransportUse> transport_uses_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

void StartScoreCall(const CallEnvironment& environment, const ScoreArgs& args,
                    const ScoreCallOptions& options, ScoreCallback done) {
  std::make_shared<ScoreCall>(environment, args, options, std::move(done))->SendMore();
}

}  // namespace logprobd::client
