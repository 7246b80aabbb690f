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
  /// A function that is called before the call is answered, whether `body` has run or not.
  using OnEnd = std::function<void(const absl::Status&)>;

  static grpc::ServerUnaryReactor* Start(const absl::Status& refusal,
                                         const std::shared_ptr<WorkCount>& work, Body body,
                                         OnEnd on_end, grpc::ByteBuffer& response) {
    auto* call = new UnaryCall(std::move(on_end), response);
    absl::Status status = refusal;
    if (status.ok()) {
      status = RunOnThread(work, [call, body = std::move(body)] { call->End(body()); });
    }
    if (!status.ok()) call->End(status);
    return call;
  }

  void OnDone() override { delete this; }

 private:
  UnaryCall(OnEnd on_end, grpc::ByteBuffer& response)
      : on_end_(std::move(on_end)), response_(response) {}

  void End(absl::StatusOr<grpc::ByteBuffer> answer) {
    const absl::Status status = answer.status();
    if (status.ok()) response_ = *std::move(answer);
    on_end_(status);
    Finish(ToAdminStatus(status));
  }

  const OnEnd on_end_;
  grpc::ByteBuffer& response_;
};

absl::Status CheckPath(absl::string_view path) {
  constexpr size_t kPathBytesMax = 4'095;
  if (path.empty() || path.size() > kPathBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("path: ", path.size(), " bytes, must be in [1, ", kPathBytesMax, "]"));
  }
  return HasControlCharacters(path)
             ? absl::InvalidArgumentError("path: holds control characters, must hold none")
             : absl::OkStatus();
}

/// A load and the stream of its progress. During a write only the latest message of each phase is
/// queued, so that a client that does not read does not delay the load. A cancelled call cancels
/// the load.
class LoadCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  LoadCall(WeightStore& store, ChangeAudit audit) : store_(store), audit_(std::move(audit)) {}

  void Run(const grpc::ByteBuffer& request) {
    const absl::StatusOr<WeightsVersion> loaded = Load(request);
    v1::LoadWeightsProgress last;
    if (loaded.ok()) {
      audit_.change().version = loaded->version;
      audit_.change().sha256 = loaded->sha256;
      last.set_phase("done");
      last.set_bytes_done(static_cast<uint64_t>(loaded->weight_bytes));
      last.set_bytes_total(static_cast<uint64_t>(loaded->weight_bytes));
      Fill(*loaded, *last.mutable_done());
    }
    audit_.End(loaded.status());
    End(ToAdminStatus(loaded.status()), last);
  }

  /// Ends a call that does not run.
  void Refuse(const absl::Status& status) {
    audit_.End(status);
    Finish(ToAdminStatus(status));
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

  absl::StatusOr<WeightsVersion> Load(const grpc::ByteBuffer& request) {
    v1::LoadWeightsRequest message;
    LOGPROBD_RETURN_IF_ERROR(ParseSmallMessage(request, message));
    audit_.change() = {.head = store_.NameOf(message.head()),
                       .version = message.version(),
                       .path = message.path(),
                       .sha256 = message.sha256()};
    LOGPROBD_RETURN_IF_ERROR(CheckPath(message.path()));
    LOGPROBD_RETURN_IF_ERROR(audit_.Begin());
    return store_.Load({.head = message.head(),
                        .path = message.path(),
                        .version = message.version(),
                        .sha256 = message.sha256(),
                        .commit = message.commit(),
                        .in_place = message.in_place(),
                        .allow_nonfinite = message.allow_nonfinite()},
                       [this](const WeightsProgress& progress) { return Report(progress); });
  }

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
  ChangeAudit audit_;
  std::atomic<bool> is_cancelled_ = false;
  absl::Mutex mutex_;
  bool is_writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer message_;        // the message being written
  std::optional<LastMessage> end_;  // is set once
};

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

template <typename Message, typename Change>
grpc::ServerUnaryReactor* WeightsService::StartChange(absl::string_view method,
                                                      const grpc::CallbackServerContext& context,
                                                      const grpc::ByteBuffer& request,
                                                      grpc::ByteBuffer& response, Change change) {
  const auto audit = std::make_shared<ChangeAudit>(AuditOf(method, context));
  return UnaryCall::Start(
      CheckRoom(), calls_,
      [this, audit, bytes = request, change]() -> absl::StatusOr<grpc::ByteBuffer> {
        Message message;
        LOGPROBD_RETURN_IF_ERROR(ParseSmallMessage(bytes, message));
        AuditedChange& audited = audit->change();
        audited.head = store_.NameOf(message.head());
        if constexpr (requires { message.version(); }) audited.version = message.version();
        LOGPROBD_RETURN_IF_ERROR(audit->Begin());
        LOGPROBD_ASSIGN_OR_RETURN(const HeadWeightsState state, change(store_, message));
        audited.version = state.live.version;
        audited.sha256 = state.live.sha256;
        v1::WeightsResponse answer;
        Fill(state, *answer.mutable_head());
        return SerializeMessage(answer);
      },
      [audit](const absl::Status& status) { audit->End(status); }, response);
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* WeightsService::Load(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  auto* call = new LoadCall(store_, AuditOf("Load", *context));
  absl::Status status = CheckRoom();
  if (status.ok()) status = RunOnThread(calls_, [call, bytes = *request] { call->Run(bytes); });
  if (!status.ok()) call->Refuse(status);
  return call;
}

grpc::ServerReadReactor<grpc::ByteBuffer>* WeightsService::Push(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  auto* call = new PushCall({.store = store_,
                             .audit = AuditOf("Push", *context),
                             .same_host = same_host_,
                             .clock = clock_,
                             .ends_soon = refuses_new_,
                             .response = *response});
  absl::Status status = CheckRoom(*pushes_, kPushesMax);
  if (status.ok()) status = RunOnThread(pushes_, [call] { call->Run(); });
  if (!status.ok()) {
    AddRetryHint(status, *context);
    call->Refuse(status);
  }
  return call;
}

grpc::ServerUnaryReactor* WeightsService::Commit(grpc::CallbackServerContext* context,
                                                 const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* response) {
  return StartChange<v1::CommitWeightsRequest>(
      "Commit", *context, *request, *response, [](WeightStore& store, const auto& message) {
        return store.Commit(message.head(), message.version());
      });
}

grpc::ServerUnaryReactor* WeightsService::Rollback(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* request,
                                                   grpc::ByteBuffer* response) {
  return StartChange<v1::RollbackWeightsRequest>(
      "Rollback", *context, *request, *response,
      [](WeightStore& store, const auto& message) { return store.Rollback(message.head()); });
}

grpc::ServerUnaryReactor* WeightsService::Discard(grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  return StartChange<v1::DiscardWeightsRequest>(
      "Discard", *context, *request, *response, [](WeightStore& store, const auto& message) {
        return store.Discard(message.head(), message.staged(), message.previous());
      });
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
      [](const absl::Status&) {}, *response);
}

}  // namespace logprobd
