#include "client/cpp/grpc_transport.h"

#include <grpc/grpc.h>
#include <grpcpp/alarm.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/stub_options.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "client/cpp/caller_queue.h"
#include "client/cpp/policy.h"

namespace logprobd::client {
namespace {

void SetMilliseconds(grpc::ChannelArguments& args, const char* name, absl::Duration value) {
  args.SetInt(name, static_cast<int>(absl::ToInt64Milliseconds(value)));
}

}  // namespace

grpc::ChannelArguments ChannelArgumentsForServers() {
  grpc::ChannelArguments args;
  // This library implements its own retries, because gRPC's retry buffer (256 KiB) is smaller than
  // a request.
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // Proxies from the environment are meant for the web, not for a scoring service.
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Keepalive detects a peer that vanished or stopped reading; the caller's memory is then
  // released.
  SetMilliseconds(args, GRPC_ARG_KEEPALIVE_TIME_MS, policy::kKeepalive);
  SetMilliseconds(args, GRPC_ARG_KEEPALIVE_TIMEOUT_MS, policy::kKeepaliveTimeout);
  return args;
}

absl::Duration ParsePushback(absl::string_view value) {
  int64_t milliseconds = 0;
  return absl::Milliseconds(absl::SimpleAtoi(value, &milliseconds) ? milliseconds : -1);
}

gpr_timespec GprDeadline(absl::Duration delay) {
  if (delay == absl::InfiniteDuration()) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(absl::ToInt64Nanoseconds(delay), GPR_TIMESPAN));
}

namespace {

constexpr char kPushbackKey[] = "grpc-retry-pushback-ms";
constexpr char kClientIdKey[] = "client_id";

std::shared_ptr<grpc::Channel> MakeChannel(const GrpcTransport::Options& options,
                                           const std::string& server, int index) {
  grpc::ChannelArguments args = ChannelArgumentsForServers();
  // The index makes the arguments differ: channels with equal arguments share one connection.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  args.SetInt("logprobd.channel", index);
  args.SetMaxReceiveMessageSize(-1);
  args.SetMaxSendMessageSize(-1);
  // GRPC_ARG_MIN_RECONNECT_BACKOFF_MS keeps its default of 20 s: in gRPC 1.51 it is also the time
  // limit of an attempt to connect.
  SetMilliseconds(args, GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, policy::kReconnectFirst);
  SetMilliseconds(args, GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, policy::kReconnectMax);
  return OpenChannel(server, options.security, args);
}

std::optional<absl::Duration> FindPushback(
    const std::multimap<grpc::string_ref, grpc::string_ref>& metadata) {
  const auto found = metadata.find(kPushbackKey);
  if (found == metadata.end()) return std::nullopt;
  return ParsePushback({found->second.data(), found->second.size()});
}

}  // namespace

/// A delay that can be cancelled before or after it is armed.
class GrpcTransport::Timer {
 public:
  void Arm(absl::Duration delay, std::function<void(bool)> callback) {
    const absl::MutexLock lock(&mutex_);
    is_armed_ = true;
    alarm_.Set(GprDeadline(is_cancelled_ ? absl::ZeroDuration() : delay), std::move(callback));
  }

  void Cancel() {
    const absl::MutexLock lock(&mutex_);
    is_cancelled_ = true;
    // Cancelling an alarm that is not set has no effect.
    if (is_armed_) alarm_.Cancel();
  }

 private:
  absl::Mutex mutex_;
  bool is_armed_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Alarm alarm_ ABSL_GUARDED_BY(mutex_);
};

class GrpcTransport::Scope final : public CancelScope {
 public:
  void Cancel() override {
    const absl::MutexLock lock(&mutex_);
    is_cancelled_ = true;
    for (grpc::ClientContext* context : contexts_) context->TryCancel();
    for (const std::shared_ptr<Timer>& timer : timers_) timer->Cancel();
  }

  bool is_cancelled() override {
    const absl::MutexLock lock(&mutex_);
    return is_cancelled_;
  }

  /// Adds a call. Returns false if the scope is cancelled; then the call must not start.
  bool Add(grpc::ClientContext* context) {
    const absl::MutexLock lock(&mutex_);
    if (!is_cancelled_) contexts_.insert(context);
    return !is_cancelled_;
  }

  void Remove(grpc::ClientContext* context) {
    const absl::MutexLock lock(&mutex_);
    contexts_.erase(context);
  }

  void Add(const std::shared_ptr<Timer>& timer) {
    const absl::MutexLock lock(&mutex_);
    timers_.insert(timer);
    if (is_cancelled_) timer->Cancel();
  }

  void Remove(const std::shared_ptr<Timer>& timer) {
    const absl::MutexLock lock(&mutex_);
    timers_.erase(timer);
  }

 private:
  absl::Mutex mutex_;
  bool is_cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_set<grpc::ClientContext*> contexts_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_set<std::shared_ptr<Timer>> timers_ ABSL_GUARDED_BY(mutex_);
};

struct GrpcTransport::CallState {
  std::string server;
  std::shared_ptr<grpc::Channel> channel;
  std::shared_ptr<Scope> scope;
  grpc::ClientContext context;
  grpc::ByteBuffer request;
  grpc::ByteBuffer response;
  RpcDone done;
  /// Used for calls on a CallerQueue only.
  std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> reader;
  grpc::Status status;
  CallerQueue::Operation finish;
};

GrpcTransport::GrpcTransport(Options options)
    : options_(std::move(options)), all_(std::make_shared<Scope>()) {}

GrpcTransport::~GrpcTransport() {
  Shutdown();
  const absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](int64_t* live) { return *live == 0; }, &live_));
}

std::shared_ptr<CancelScope> GrpcTransport::NewScope() { return std::make_shared<Scope>(); }

std::shared_ptr<grpc::Channel> GrpcTransport::NextChannel(const std::string& server) {
  const absl::MutexLock lock(&mutex_);
  if (shut_down_) return nullptr;
  Server& connections = servers_[server];
  for (int index = static_cast<int>(connections.channels.size()); index < options_.channels;
       ++index) {
    connections.channels.push_back(MakeChannel(options_, server, index));
  }
  ++live_;
  ++connections.inflight;
  return connections.channels[connections.turn++ % connections.channels.size()];
}

void GrpcTransport::FinishOne(const std::string& server) {
  const absl::MutexLock lock(&mutex_);
  --live_;
  if (const auto found = servers_.find(server); found != servers_.end()) --found->second.inflight;
}

void GrpcTransport::KeepServers(const std::vector<std::string>& servers) {
  // A thread of gRPC must not release the last reference to a channel: gRPC 1.51 could make it wait
  // for itself. So a server keeps its channels until a later call finds none of its calls in
  // flight.
  std::vector<Server> closed;
  const absl::MutexLock lock(&mutex_);
  for (auto it = servers_.begin(); it != servers_.end();) {
    if (it->second.inflight > 0 || absl::c_linear_search(servers, it->first)) {
      ++it;
      continue;
    }
    closed.push_back(std::move(it->second));
    it = servers_.erase(it);
  }
}

void GrpcTransport::Call(RpcRequest&& request, RpcDone done) {
  std::shared_ptr<grpc::Channel> channel = NextChannel(request.server);
  if (channel == nullptr) {
    std::move(done)({.status = absl::CancelledError("the client is shutting down")});
    return;
  }
  auto* state = new CallState;
  state->server = std::move(request.server);
  state->channel = std::move(channel);
  state->scope = std::static_pointer_cast<Scope>(request.scope);
  state->request.Swap(&request.body);
  state->done = std::move(done);
  if (request.deadline != absl::InfiniteFuture()) {
    state->context.set_deadline(GprDeadline(request.deadline - Now()));
  }
  if (!options_.client_id.empty()) state->context.AddMetadata(kClientIdKey, options_.client_id);
  AddToken(options_.token, state->context);
  if (const std::string& traceparent = state->scope->traceparent; !traceparent.empty()) {
    state->context.AddMetadata("traceparent", traceparent);
  }

  const auto finish = [this, state](const grpc::Status& status) {
    state->scope->Remove(&state->context);
    all_->Remove(&state->context);
    RpcReply reply;
    reply.status =
        absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
    if (status.ok()) {
      reply.body.Swap(&state->response);
    } else {
      reply.pushback = FindPushback(state->context.GetServerTrailingMetadata());
    }
    RpcDone callback = std::move(state->done);
    const std::string server = std::move(state->server);
    // The state is deleted before the callback runs, which may wait for the caller's memory to be
    // released.
    delete state;
    std::move(callback)(std::move(reply));
    FinishOne(server);
  };
  if (!state->scope->Add(&state->context) || !all_->Add(&state->context)) {
    state->scope->Remove(&state->context);
    RpcDone callback = std::move(state->done);
    const std::string server = std::move(state->server);
    delete state;
    std::move(callback)(
        {.status = absl::CancelledError("the call was cancelled before it was sent")});
    FinishOne(server);
    return;
  }
  if (CallerQueue* const queue = state->scope->queue.get(); queue != nullptr && queue->Begin()) {
    state->finish = [finish, state] { finish(state->status); };
    state->reader =
        grpc::GenericStub(state->channel)
            .PrepareUnaryCall(&state->context, request.method, state->request, queue->cq());
    state->reader->StartCall();
    state->reader->Finish(&state->response, &state->status, &state->finish);
    return;
  }
  grpc::GenericStub(state->channel)
      .UnaryCall(&state->context, request.method, grpc::StubOptions(), &state->request,
                 &state->response, finish);
}

void GrpcTransport::After(absl::Duration delay, const std::shared_ptr<CancelScope>& scope,
                          absl::AnyInvocable<void() &&> callback) {
  {
    const absl::MutexLock lock(&mutex_);
    ++live_;
  }
  auto timer = std::make_shared<Timer>();
  auto own_scope = std::static_pointer_cast<Scope>(scope);
  if (own_scope != nullptr) own_scope->Add(timer);
  all_->Add(timer);
  // gRPC requires a copyable function.
  auto shared_callback = std::make_shared<absl::AnyInvocable<void() &&>>(std::move(callback));
  timer->Arm(delay, [this, timer, own_scope, shared_callback](bool) mutable {
    if (own_scope != nullptr) own_scope->Remove(timer);
    all_->Remove(timer);
    std::move (*shared_callback)();
    shared_callback.reset();
    // The timer owns the alarm, and the alarm owns this function. The reset breaks the cycle.
    timer.reset();
    FinishOne("");
  });
}

absl::Time GrpcTransport::Now() const {
  const auto since_epoch = std::chrono::steady_clock::now().time_since_epoch();
  return absl::UnixEpoch() + absl::FromChrono(since_epoch);
}

void GrpcTransport::Shutdown() {
  std::map<std::string, Server> closed;
  {
    const absl::MutexLock lock(&mutex_);
    shut_down_ = true;
  }
  all_->Cancel();
  const absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](int64_t* live) { return *live == 0; }, &live_));
  closed.swap(servers_);
}

}  // namespace logprobd::client
