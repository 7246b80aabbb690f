#include "server/transport/health_service.h"

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "google/protobuf/wrappers.pb.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/transport/call_info.h"
#include "server/transport/grpc_message.h"

namespace logprobd {
namespace {

constexpr char kCheck[] = "/grpc.health.v1.Health/Check";
constexpr char kWatch[] = "/grpc.health.v1.Health/Watch";

/// Values of HealthCheckResponse.status.
constexpr int kServing = 1;
constexpr int kNotServing = 2;
constexpr int kServiceUnknown = 3;

/// Returns HealthCheckRequest.service, or nullopt if the message is malformed or too large. A
/// google.protobuf.StringValue has the same bytes, and as HealthCheckRequest gRPC and programs may
/// bring generated code of their own.
std::optional<std::string> ServiceOf(const grpc::ByteBuffer& message) {
  google::protobuf::StringValue request;
  if (!ParseSmallMessage(message, request).ok()) return std::nullopt;
  return request.value();
}

/// Returns a HealthCheckResponse, which has the bytes of a google.protobuf.Int32Value.
grpc::ByteBuffer ResponseOf(int status) {
  google::protobuf::Int32Value response;
  response.set_value(status);
  return SerializeMessage(response);
}

bool IsKnown(absl::string_view service) {
  return service.empty() || service == "logprobd.v1.Scoring";
}

}  // namespace

struct HealthService::Impl {
  class Call;
  class Methods;
  using Calls = std::list<Call*>;

  /// What to do next for a call, without the mutex. The call may be gone if that is nothing.
  enum class Step { kNothing, kRead, kWrite, kAnswer, kFinish, kCancel };
  struct Action {
    Call* call = nullptr;
    Step step = Step::kNothing;
  };

  enum class Phase {
    kMessage,          ///< The message has not arrived yet.
    kAwaitsHalfClose,  ///< The message of a watch has arrived, but not the end of the client's
                       ///< half.
    kWatching,
    kEnding,  ///< The call is or will be finished.
    kCancelled,
  };

  Impl(const Options& service_options, const Clock& service_clock)
      : options(service_options), clock(service_clock) {}

  int CurrentStatus() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return is_serving ? kServing : kNotServing;
  }
  void SetDeadline(Call& call, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void SetPhase(Call& call, Phase phase) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  /// Adds a call to those that count.
  void List(Call& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void Unlist(Call& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  /// Cancels a call that `call` replaces, if there are too many.
  Action MakeRoom(const Call& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  Action Answer(Call& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  Action End(Call& call, grpc::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  Action Cancel(Call& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  /// Sends the status to a watch that does not have it yet.
  Action Send(Call& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  Action AfterRead(Call& call, bool ok) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  Action AfterWrite(Call& call, bool ok) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  Action AfterDeadline(Call& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  /// Does the step that `decide` returns, which is called with the mutex.
  template <typename Decide>
  Step Perform(Decide decide) ABSL_LOCKS_EXCLUDED(mutex);
  void Run();

  const Options options;
  const Clock& clock;
  absl::Mutex mutex;
  bool is_stopping ABSL_GUARDED_BY(mutex) = false;
  bool is_serving ABSL_GUARDED_BY(mutex) = false;
  Calls calls ABSL_GUARDED_BY(mutex);  ///< Oldest first, as those of a peer.
  absl::flat_hash_map<std::string, Calls> by_peer ABSL_GUARDED_BY(mutex);
  std::set<std::pair<absl::Time, Call*>> deadlines ABSL_GUARDED_BY(mutex);
  uint64_t last_number ABSL_GUARDED_BY(mutex) = 0;
  int num_waiting ABSL_GUARDED_BY(mutex) = 0;  ///< Calls in kMessage or kAwaitsHalfClose.
  /// The calls for which a thread is in TryCancel, or about to be.
  absl::flat_hash_map<uint64_t, std::thread::id> cancelling ABSL_GUARDED_BY(mutex);
  std::thread thread;
};

/// A call of Check or Watch. Impl::mutex guards its state. A thread that has changed the state so
/// that a step follows does that step, and the call lives at least until then.
class HealthService::Impl::Call final : public grpc::ServerGenericBidiReactor {
 public:
  Call(Impl& service, grpc::CallbackServerContext& context, bool is_watch)
      : is_watch(is_watch),
        peer(PeerNetworkOf(context.peer())),
        service_(service),
        context_(context) {
    service_.Perform([this] {
      service_.List(*this);
      return Action{this, Step::kRead};
    });
    while (service_.Perform([this] { return service_.MakeRoom(*this); }) != Step::kNothing) {
    }
  }

  void OnReadDone(bool ok) override {
    service_.Perform([this, ok] { return service_.AfterRead(*this, ok); });
  }
  void OnWriteDone(bool ok) override {
    service_.Perform([this, ok] { return service_.AfterWrite(*this, ok); });
  }
  void OnCancel() override {
    service_.Perform([this] { return service_.End(*this, grpc::Status::CANCELLED); });
  }
  void OnDone() override {
    service_.Perform([this] {
      const auto may_go = [this] {
        const auto found = service_.cancelling.find(number);
        return found == service_.cancelling.end() || found->second == std::this_thread::get_id();
      };
      service_.mutex.Await(absl::Condition(&may_go));
      service_.Unlist(*this);
      service_.deadlines.erase({deadline, this});
      return Action();
    });
    delete this;
  }

  void Perform(Step step) {
    switch (step) {
      case Step::kNothing:
        break;
      case Step::kRead:
        StartRead(&message);
        break;
      case Step::kWrite:
        StartWrite(&response);
        break;
      case Step::kAnswer:
        StartWriteAndFinish(&response, grpc::WriteOptions(), grpc::Status::OK);
        break;
      case Step::kFinish:
        Finish(end);
        break;
      case Step::kCancel:
        context_.TryCancel();
    }
  }

  const bool is_watch;
  const std::string peer;

  uint64_t number = 0;  ///< Of no other call.
  Phase phase = Phase::kMessage;
  absl::Time deadline = absl::InfiniteFuture();
  bool is_known = true;  ///< The message of a watch names a service that exists.
  int sent = 0;          ///< The last status that a watch has sent or is sending.
  bool is_writing = false;
  bool is_finished = false;  ///< Finish, or what includes it, was or will be called.
  bool is_listed = false;
  Calls::iterator in_calls;
  Calls::iterator in_peer;
  grpc::Status end;
  grpc::ByteBuffer message;
  grpc::ByteBuffer response;

 private:
  Impl& service_;
  grpc::CallbackServerContext& context_;
};

class HealthService::Impl::Methods final : public grpc::CallbackGenericService {
 public:
  explicit Methods(Impl& service) : service_(service) {}

  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    if (!Serves(context->method())) return CallbackGenericService::CreateReactor(context);
    return new Call(service_, *context, context->method() == kWatch);
  }

 private:
  Impl& service_;
};

void HealthService::Impl::SetDeadline(Call& call, absl::Time deadline) {
  deadlines.erase({call.deadline, &call});
  call.deadline = deadline;
  deadlines.insert({deadline, &call});
}

void HealthService::Impl::SetPhase(Call& call, Phase phase) {
  const bool waited = call.phase <= Phase::kAwaitsHalfClose;
  if (waited && phase > Phase::kAwaitsHalfClose) --num_waiting;
  call.phase = phase;
}

void HealthService::Impl::Unlist(Call& call) {
  if (!std::exchange(call.is_listed, false)) return;
  calls.erase(call.in_calls);
  const auto peer = by_peer.find(call.peer);
  peer->second.erase(call.in_peer);
  if (peer->second.empty()) by_peer.erase(peer);
}

void HealthService::Impl::List(Call& call) {
  call.number = ++last_number;
  call.in_calls = calls.insert(calls.end(), &call);
  Calls& of_peer = by_peer[call.peer];
  call.in_peer = of_peer.insert(of_peer.end(), &call);
  call.is_listed = true;
  const bool is_crowded = num_waiting++ >= options.waiting_calls_max;
  SetDeadline(call, clock.Now() +
                        (is_crowded ? options.crowded_message_time_max : options.message_time_max));
}

HealthService::Impl::Action HealthService::Impl::MakeRoom(const Call& call) {
  const auto of_peer = by_peer.find(call.peer);
  if (of_peer != by_peer.end() &&
      of_peer->second.size() > static_cast<size_t>(options.peer_calls_max)) {
    return Cancel(*of_peer->second.front());
  }
  if (calls.size() > static_cast<size_t>(options.calls_max)) return Cancel(*calls.front());
  return {};
}

HealthService::Impl::Action HealthService::Impl::Answer(Call& call) {
  SetPhase(call, Phase::kEnding);
  call.is_finished = true;
  SetDeadline(call, clock.Now() + options.answer_time_max);
  call.response = ResponseOf(CurrentStatus());
  return {&call, Step::kAnswer};
}

HealthService::Impl::Action HealthService::Impl::End(Call& call, grpc::Status status) {
  if (call.phase < Phase::kEnding) {
    SetPhase(call, Phase::kEnding);
    call.end = std::move(status);
    SetDeadline(call, clock.Now() + options.answer_time_max);
  }
  // gRPC takes no Finish beside a write.
  if (call.is_writing || std::exchange(call.is_finished, true)) return {};
  return {&call, Step::kFinish};
}

HealthService::Impl::Action HealthService::Impl::Cancel(Call& call) {
  if (call.phase < Phase::kEnding) call.end = grpc::Status::CANCELLED;
  SetPhase(call, Phase::kCancelled);
  cancelling.emplace(call.number, std::this_thread::get_id());
  deadlines.erase({call.deadline, &call});
  Unlist(call);
  return {&call, Step::kCancel};
}

HealthService::Impl::Action HealthService::Impl::Send(Call& call) {
  const int status = call.is_known ? CurrentStatus() : kServiceUnknown;
  if (call.phase != Phase::kWatching || call.is_writing || call.sent == status) return {};
  call.sent = status;
  call.is_writing = true;
  call.response = ResponseOf(status);
  return {&call, Step::kWrite};
}

HealthService::Impl::Action HealthService::Impl::AfterRead(Call& call, bool ok) {
  switch (call.phase) {
    case Phase::kMessage: {
      const std::optional<std::string> service = ok ? ServiceOf(call.message) : std::nullopt;
      call.message.Clear();
      if (!service.has_value()) {
        return End(call, {grpc::StatusCode::INVALID_ARGUMENT,
                          "the call has no well-formed HealthCheckRequest"});
      }
      call.is_known = IsKnown(*service);
      if (call.is_watch) {
        SetPhase(call, Phase::kAwaitsHalfClose);
        return {&call, Step::kRead};
      }
      return call.is_known ? Answer(call)
                           : End(call, {grpc::StatusCode::NOT_FOUND, "unknown service"});
    }
    case Phase::kAwaitsHalfClose:
      if (ok) return End(call, {grpc::StatusCode::INVALID_ARGUMENT, "the call has two messages"});
      SetPhase(call, Phase::kWatching);
      SetDeadline(call, clock.Now() + options.watch_time_max);
      return Send(call);
    default:
      return {};
  }
}

HealthService::Impl::Action HealthService::Impl::AfterWrite(Call& call, bool ok) {
  call.is_writing = false;
  if (!ok || call.phase >= Phase::kEnding) return End(call, grpc::Status::CANCELLED);
  return Send(call);
}

HealthService::Impl::Action HealthService::Impl::AfterDeadline(Call& call) {
  switch (call.phase) {
    case Phase::kMessage:
      if (!call.is_watch) return Answer(call);
      [[fallthrough]];
    case Phase::kAwaitsHalfClose:
      return End(call, {grpc::StatusCode::UNAVAILABLE,
                        "the message, or the end of the client's half, has not arrived in time"});
    case Phase::kWatching:
      return End(call, {grpc::StatusCode::UNAVAILABLE,
                        absl::StrCat("a watch ends after ",
                                     absl::FormatDuration(options.watch_time_max))});
    default:
      return Cancel(call);
  }
}

template <typename Decide>
HealthService::Impl::Step HealthService::Impl::Perform(Decide decide) {
  Action action;
  uint64_t number = 0;
  {
    const absl::MutexLock lock(&mutex);
    action = decide();
    if (action.step == Step::kNothing) return action.step;
    number = action.call->number;
  }
  action.call->Perform(action.step);
  if (action.step == Step::kCancel) {  // gRPC may have ended the call on this thread
    const absl::MutexLock lock(&mutex);
    cancelling.erase(number);
  }
  return action.step;
}

void HealthService::Impl::Run() {
  while (true) {
    bool is_over = false;
    Perform([&] {
      const auto next = [this] {
        return deadlines.empty() ? absl::InfiniteFuture() : deadlines.begin()->first;
      };
      const absl::Time until = next();
      const auto has_news = [&] { return is_stopping || next() != until; };
      clock.AwaitUntil(mutex, absl::Condition(&has_news), until);
      is_over = is_stopping;
      if (is_over || next() > clock.Now()) return Action();
      Call& call = *deadlines.begin()->second;
      deadlines.erase(deadlines.begin());
      return AfterDeadline(call);
    });
    if (is_over) return;
  }
}

HealthService::HealthService(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<HealthService>> HealthService::Create(const Options& options,
                                                                     const Clock& clock) {
  auto impl = std::make_unique<Impl>(options, clock);
  LOGPROBD_ASSIGN_OR_RETURN(impl->thread,
                            StartThread("health", [impl = impl.get()] { impl->Run(); }));
  return std::unique_ptr<HealthService>(new HealthService(std::move(impl)));
}

HealthService::~HealthService() {
  {
    const absl::MutexLock lock(&impl_->mutex);
    impl_->is_stopping = true;
  }
  impl_->thread.join();
}

bool HealthService::Serves(absl::string_view path) { return path == kCheck || path == kWatch; }

std::unique_ptr<grpc::CallbackGenericService> HealthService::NewMethods() {
  return std::make_unique<Impl::Methods>(*impl_);
}

void HealthService::SetServing(bool serving) {
  std::vector<Impl::Action> due;
  {
    const absl::MutexLock lock(&impl_->mutex);
    impl_->is_serving = serving;
    for (Impl::Call* const call : impl_->calls) due.push_back(impl_->Send(*call));
  }
  // A watch lives until its write is done.
  for (const Impl::Action& action : due) {
    if (action.step == Impl::Step::kWrite) action.call->Perform(action.step);
  }
}

}  // namespace logprobd
