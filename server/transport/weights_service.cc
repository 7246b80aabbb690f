#include "server/transport/weights_service.h"

#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/base/text.h"
#include "server/transport/audit.h"
#include "server/transport/grpc_message.h"
#include "server/transport/grpc_status.h"
#include "server/transport/push_call.h"
#include "server/transport/weights_messages.h"

namespace logprobd {
namespace {

/// Hint to calls that found no room. Clients add a random wait of their own.
constexpr absl::Duration kRetryAfter = absl::Milliseconds(200);

/// Writes the change to the audit log and returns the answer of its call.
absl::StatusOr<grpc::ByteBuffer> Answer(const Caller& caller, AuditedChange change,
                                        const absl::StatusOr<HeadWeightsState>& state) {
  if (state.ok()) {
    change.version = state->live.version;
    change.sha256 = state->live.sha256;
  }
  Audit(caller, change, state.status());
  LOGPROBD_RETURN_IF_ERROR(state.status());
  v1::WeightsResponse response;
  Fill(*state, *response.mutable_head());
  return SerializeMessage(response);
}

/// Runs `body` on a thread that `work` counts. On error `body` does not run.
absl::Status RunOnThread(const std::shared_ptr<WorkCount>& work, std::function<void()> body) {
  work->Begin();
  absl::StatusOr<std::thread> thread = StartThread("weights", [work, run = std::move(body)] {
    run();
    work->End();
  });
  if (!thread.ok()) {
    work->End();
    return thread.status();
  }
  thread->detach();  // `work` counts it until its end
  return absl::OkStatus();
}

/// A call with one response. It cannot be cancelled, because its change takes only a short time.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  using Body = std::function<absl::StatusOr<grpc::ByteBuffer>()>;

  static grpc::ServerUnaryReactor* Start(const absl::Status& refusal,
                                         const std::shared_ptr<WorkCount>& work, Body body,
                                         grpc::ByteBuffer& response) {
    auto* call = new UnaryCall(response);
    absl::Status status = refusal;
    if (status.ok()) {
      status = RunOnThread(work, [call, body = std::move(body)] { call->Run(body); });
    }
    if (!status.ok()) call->Finish(ToAdminStatus(status));
    return call;
  }

  void OnDone() override { delete this; }

 private:
  explicit UnaryCall(grpc::ByteBuffer& response) : response_(response) {}

  void Run(const Body& body) {
    absl::StatusOr<grpc::ByteBuffer> answer = body();
    const absl::Status status = answer.status();
    if (status.ok()) response_ = *std::move(answer);
    Finish(ToAdminStatus(status));
  }

  grpc::ByteBuffer& response_;
};

/// A load and the stream of its progress. During a write only the latest message of each phase is
/// queued, so that a client that does not read does not delay the load. A cancelled call cancels
/// the load.
class LoadCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  LoadCall(WeightStore& store, Caller caller) : store_(store), caller_(std::move(caller)) {}

  void Run(const WeightsLoad& load) {
    const absl::StatusOr<WeightsVersion> loaded =
        store_.Load(load, [this](const WeightsProgress& progress) { return Report(progress); });
    Audit(caller_,
          {.method = "Load",
           .head = store_.NameOf(load.head),
           .version = loaded.ok() ? loaded->version : load.version,
           .path = load.path,
           .sha256 = loaded.ok() ? loaded->sha256 : load.sha256},
          loaded.status());
    v1::LoadWeightsProgress last;
    if (loaded.ok()) {
      last.set_phase("done");
      last.set_bytes_done(static_cast<uint64_t>(loaded->weight_bytes));
      last.set_bytes_total(static_cast<uint64_t>(loaded->weight_bytes));
      Fill(*loaded, *last.mutable_done());
    }
    End(ToAdminStatus(loaded.status()), last);
  }

  void OnCancel() override { is_cancelled_ = true; }

  void OnWriteDone(bool /*is_sent*/) override {
    bool is_end = false;
    {
      const absl::MutexLock lock(&mutex_);
      is_writing_ = !waiting_.empty();
      is_end = !is_writing_ && end_.has_value();
      if (is_writing_) {
        message_.Swap(&waiting_.front().message);
        waiting_.pop_front();
      } else if (!is_end || std::exchange(has_ended_, true)) {
        return;
      }
    }
    if (is_end) {
      FinishWith(*end_);
    } else {
      StartWrite(&message_);
    }
  }

  void OnDone() override { delete this; }

 private:
  struct Waiting {
    std::string phase;
    grpc::ByteBuffer message;
  };

  struct LastMessage {
    grpc::Status status;
    grpc::ByteBuffer message;
  };

  /// Sends or queues a message. Returns false when the call was cancelled.
  bool Report(const WeightsProgress& progress) {
    v1::LoadWeightsProgress message;
    message.set_phase(progress.phase);
    message.set_bytes_done(static_cast<uint64_t>(progress.bytes_done));
    message.set_bytes_total(static_cast<uint64_t>(progress.bytes_total));
    {
      const absl::MutexLock lock(&mutex_);
      if (is_cancelled_) return false;
      if (is_writing_) {
        if (waiting_.empty() || waiting_.back().phase != progress.phase) {
          waiting_.push_back({.phase = progress.phase, .message = {}});
        }
        waiting_.back().message = SerializeMessage(message);
        return true;
      }
      is_writing_ = true;
      message_ = SerializeMessage(message);
    }
    StartWrite(&message_);
    return true;
  }

  void End(grpc::Status status, const v1::LoadWeightsProgress& last) {
    {
      const absl::MutexLock lock(&mutex_);
      end_ = LastMessage{std::move(status), SerializeMessage(last)};
      if (is_writing_) {
        return;  // OnWriteDone continues
      }
      has_ended_ = true;
    }
    FinishWith(*end_);
  }

  /// Ends the call. Must be called without the lock and as the last action, because OnDone may run
  /// before it returns.
  void FinishWith(const LastMessage& end) {
    if (end.status.ok()) {
      StartWriteAndFinish(&end.message, grpc::WriteOptions(), grpc::Status::OK);
    } else {
      Finish(end.status);
    }
  }

  WeightStore& store_;
  const Caller caller_;
  std::atomic<bool> is_cancelled_ = false;
  absl::Mutex mutex_;
  bool is_writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer message_;        // the message being written
  std::optional<LastMessage> end_;  // is set once
};

absl::StatusOr<WeightsLoad> ParseLoad(const grpc::ByteBuffer& request) {
  v1::LoadWeightsRequest message;
  LOGPROBD_RETURN_IF_ERROR(ParseSmallMessage(request, message));
  constexpr size_t kPathBytesMax = 4'095;
  if (message.path().empty() || message.path().size() > kPathBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("path: ", message.path().size(),
                                                   " bytes, must be in [1, ", kPathBytesMax, "]"));
  }
  if (HasControlCharacters(message.path())) {
    return absl::InvalidArgumentError("path: holds control characters, must hold none");
  }
  return WeightsLoad{.head = message.head(),
                     .path = message.path(),
                     .version = message.version(),
                     .sha256 = message.sha256(),
                     .commit = message.commit(),
                     .in_place = message.in_place(),
                     .allow_nonfinite = message.allow_nonfinite()};
}

}  // namespace

absl::Status WeightsService::CheckRoom(const WorkCount& running, int max) const {
  if (refuses_new_) return absl::UnavailableError("the server is shutting down");
  if (running.count() >= max) {
    return WithRetryAfter(absl::ResourceExhaustedError(
                              absl::StrCat(max, &running == pushes_.get() ? " pushes" : " calls",
                                           " of the Weights service are running: try again later")),
                          kRetryAfter);
  }
  return absl::OkStatus();
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* WeightsService::Load(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  auto* call = new LoadCall(store_, CallerOf(*context, access_));
  absl::Status status = CheckRoom();
  if (status.ok()) {
    const absl::StatusOr<WeightsLoad> load = ParseLoad(*request);
    status =
        load.ok() ? RunOnThread(calls_, [call, load = *load] { call->Run(load); }) : load.status();
  }
  if (!status.ok()) call->Finish(ToAdminStatus(status));
  return call;
}

grpc::ServerReadReactor<grpc::ByteBuffer>* WeightsService::Push(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  auto* call = new PushCall({.store = store_,
                             .caller = CallerOf(*context, access_),
                             .same_host = same_host_,
                             .clock = clock_,
                             .ends_soon = refuses_new_,
                             .response = *response});
  absl::Status status = CheckRoom(*pushes_, kPushesMax);
  if (status.ok()) status = RunOnThread(pushes_, [call] { call->Run(); });
  if (!status.ok()) {
    AddRetryHint(status, *context);
    call->Finish(ToAdminStatus(status));
  }
  return call;
}

grpc::ServerUnaryReactor* WeightsService::Commit(grpc::CallbackServerContext* context,
                                                 const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* response) {
  return UnaryCall::Start(
      CheckRoom(), calls_,
      [this, caller = CallerOf(*context, access_),
       bytes = *request]() -> absl::StatusOr<grpc::ByteBuffer> {
        v1::CommitWeightsRequest message;
        LOGPROBD_RETURN_IF_ERROR(ParseSmallMessage(bytes, message));
        return Answer(caller,
                      {.method = "Commit",
                       .head = store_.NameOf(message.head()),
                       .version = message.version(),
                       .path = "",
                       .sha256 = ""},
                      store_.Commit(message.head(), message.version()));
      },
      *response);
}

grpc::ServerUnaryReactor* WeightsService::Rollback(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* request,
                                                   grpc::ByteBuffer* response) {
  return UnaryCall::Start(
      CheckRoom(), calls_,
      [this, caller = CallerOf(*context, access_),
       bytes = *request]() -> absl::StatusOr<grpc::ByteBuffer> {
        v1::RollbackWeightsRequest message;
        LOGPROBD_RETURN_IF_ERROR(ParseSmallMessage(bytes, message));
        return Answer(caller,
                      {.method = "Rollback",
                       .head = store_.NameOf(message.head()),
                       .version = 0,
                       .path = "",
                       .sha256 = ""},
                      store_.Rollback(message.head()));
      },
      *response);
}

grpc::ServerUnaryReactor* WeightsService::Discard(grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  return UnaryCall::Start(
      CheckRoom(), calls_,
      [this, caller = CallerOf(*context, access_),
       bytes = *request]() -> absl::StatusOr<grpc::ByteBuffer> {
        v1::DiscardWeightsRequest message;
        LOGPROBD_RETURN_IF_ERROR(ParseSmallMessage(bytes, message));
        return Answer(caller,
                      {.method = "Discard",
                       .head = store_.NameOf(message.head()),
                       .version = 0,
                       .path = "",
                       .sha256 = ""},
                      store_.Discard(message.head(), message.staged(), message.previous()));
      },
      *response);
}

grpc::ServerUnaryReactor* WeightsService::List(grpc::CallbackServerContext* /*context*/,
                                               const grpc::ByteBuffer* request,
                                               grpc::ByteBuffer* response) {
  return UnaryCall::Start(
      CheckRoom(), calls_,
      [this, bytes = *request]() -> absl::StatusOr<grpc::ByteBuffer> {
        v1::ListWeightsRequest message;
        LOGPROBD_RETURN_IF_ERROR(ParseSmallMessage(bytes, message));
        LOGPROBD_ASSIGN_OR_RETURN(const std::vector<HeadWeightsState> heads,
                                  store_.List(message.head()));
        v1::ListWeightsResponse answer;
        for (const HeadWeightsState& head : heads) Fill(head, *answer.add_heads());
        return SerializeMessage(answer);
      },
      *response);
}

}  // namespace logprobd
