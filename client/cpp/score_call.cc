#include "client/cpp/score_call.h"

#include <atomic>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/chunk_plan.h"
#include "client/cpp/request_encoder.h"
#include "client/cpp/result_merger.h"

namespace logprobd::client {
namespace {

constexpr char kScoreMethod[] = "/logprobd.v1.Scoring/Score";

/// Hands the result over when the call has ended and gRPC has dropped every slice of the caller's
/// memory, whichever comes last.
class Delivery {
 public:
  Delivery(RpcTransport& transport, ScoreCallback done)
      : transport_(transport), done_(std::move(done)) {}

  /// To be kept by a slice.
  static std::shared_ptr<void> Hold(const std::shared_ptr<Delivery>& delivery) {
    delivery->holds_.fetch_add(1, std::memory_order_relaxed);
    return {nullptr, [delivery](void*) { Drop(delivery, /*inside_grpc=*/true); }};
  }

  /// Ends the call's own hold.
  static void Finish(const std::shared_ptr<Delivery>& delivery,
                     absl::StatusOr<ScoreResult> result) {
    delivery->result_ = std::move(result);
    Drop(delivery, /*inside_grpc=*/false);
  }

 private:
  static void Drop(const std::shared_ptr<Delivery>& delivery, bool inside_grpc) {
    if (delivery->holds_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const auto deliver = [delivery] { std::move(delivery->done_)(std::move(delivery->result_)); };
    // gRPC drops slices while it holds locks of its own; the caller's code must not run there.
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
        merger_(args_, plan_) {}

  /// Sends while the window has room.
  void SendMore() {
    while (true) {
      const Chunk* chunk = nullptr;
      {
        absl::MutexLock lock(&mutex_);
        if (!status_.ok() || next_chunk_ == plan_.chunks.size() ||
            inflight_ == options_.max_inflight) {
          return;
        }
        chunk = &plan_.chunks[next_chunk_++];
        ++inflight_;
      }
      Send(*chunk);
    }
  }

 private:
  void Send(const Chunk& chunk) {
    auto self = shared_from_this();
    StartRetryingCall(
        environment_,
        {.method = kScoreMethod,
         .request =
             [self, &chunk] {
               return EncodeScoreRequest(self->args_, self->plan_, chunk,
                                         Delivery::Hold(self->delivery_));
             },
         .deadline = options_.deadline,
         .timeout = options_.timeout,
         .scope = scope_},
        [self, &chunk](const CallOutcome& outcome) { self->Receive(chunk, outcome); });
  }

  void Receive(const Chunk& chunk, const CallOutcome& outcome) {
    bool is_last = false;
    bool has_failed = false;
    {
      absl::MutexLock lock(&mutex_);
      --inflight_;
      retries_ += outcome.attempts - 1;
      if (status_.ok()) {
        status_ = outcome.status.ok() ? merger_.Add(chunk, outcome.body)
                                      : WithPlace(outcome.status, chunk);
        has_failed = !status_.ok();
        if (!has_failed) {
          rows_done_ += chunk.rows();
          if (args_.on_progress) args_.on_progress(rows_done_);
        }
      }
      is_last = inflight_ == 0 && (!status_.ok() || next_chunk_ == plan_.chunks.size());
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
      absl::MutexLock lock(&mutex_);
      if (status_.ok()) {
        result = merger_.Finish();
        result->retries = retries_;
      } else {
        result = status_;
      }
    }
    Delivery::Finish(delivery_, std::move(result));
  }

  /// The server counts a request's rows from 0; says which rows of the call these are.
  absl::Status WithPlace(const absl::Status& status, const Chunk& chunk) const {
    if (plan_.chunks.size() == 1) return status;
    return {status.code(), absl::StrCat(status.message(), " [in the request with rows ",
                                        chunk.row_begin, " to ", chunk.row_end - 1,
                                        " of this call; its row 0 is row ", chunk.row_begin, "]")};
  }

  const CallEnvironment& environment_;
  const ScoreArgs args_;  // spans still refer to the caller's memory
  const ScoreCallOptions options_;
  const ChunkPlan plan_;
  const std::shared_ptr<CancelScope> scope_;
  const std::shared_ptr<Delivery> delivery_;

  absl::Mutex mutex_;
  ResultMerger merger_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  size_t next_chunk_ ABSL_GUARDED_BY(mutex_) = 0;
  int32_t inflight_ ABSL_GUARDED_BY(mutex_) = 0;
  int32_t retries_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t rows_done_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace

void StartScoreCall(const CallEnvironment& environment, const ScoreArgs& args,
                    const ScoreCallOptions& options, ScoreCallback done) {
  std::make_shared<ScoreCall>(environment, args, options, std::move(done))->SendMore();
}

}  // namespace logprobd::client
