#include "client/cpp/client.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/random/random.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/cpp/addresses.h"
#include "client/cpp/balancing_transport.h"
#include "client/cpp/caller_queue.h"
#include "client/cpp/grpc_transport.h"
#include "client/cpp/local_transport.h"
#include "client/cpp/retrying_call.h"
#include "client/cpp/score.h"
#include "client/cpp/score_call.h"
#include "client/cpp/server_messages.h"

namespace logprobd::client {
namespace {

absl::Status CheckRange(absl::string_view name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is ", value, ", must be ", least, " to ", most));
}

absl::Status CheckOptions(const Client::Options& options) {
  absl::Status status = ParseAddresses(options.address).status();
  status.Update(CheckRange("channels", options.channels, 1, 64));
  constexpr int64_t kAnyNumber = std::numeric_limits<int32_t>::max();
  status.Update(CheckRange("attempts_max", options.attempts_max, 1, kAnyNumber));
  status.Update(
      CheckRange("overloaded_attempts_max", options.overloaded_attempts_max, 1, kAnyNumber));
  status.Update(CheckRange("max_inflight", options.max_inflight, 1, 1024));
  status.Update(CheckRange("request_bytes", options.request_bytes, 4096,
                           std::numeric_limits<int64_t>::max()));
  if (options.timeout <= absl::ZeroDuration()) {
    status.Update(absl::InvalidArgumentError(
        absl::StrCat("timeout is ", absl::FormatDuration(options.timeout), ", must be above 0")));
  }
  if (options.busy_poll < absl::ZeroDuration()) {
    status.Update(absl::InvalidArgumentError(
        absl::StrCat("busy_poll is ", absl::FormatDuration(options.busy_poll), ", must be >= 0")));
  }
  if (options.backoff_initial < absl::ZeroDuration() ||
      options.backoff_max < options.backoff_initial) {
    status.Update(
        absl::InvalidArgumentError("backoff_initial must be at least 0 and at most backoff_max"));
  }
  return status;
}

double UnitRandom() {
  thread_local absl::BitGen generator;
  return absl::Uniform(generator, 0.0, 1.0);
}

/// Returns the limits of the named head. An unknown head gets the cautious defaults, so that the
/// request reaches the server, which reports the error.
Limits FindLimits(const ServerInfo& info, const std::string& head) {
  if (head.empty() && info.heads.size() == 1) return info.heads.front().limits;
  for (const Head& candidate : info.heads) {
    if (candidate.name == head) return candidate.limits;
  }
  return {};
}

/// Returns the options of the transport. `options` must have been checked.
BalancingTransport::Options TransportOptions(const Client::Options& options,
                                             const ChannelSecurity& security) {
  return {.addresses = *ParseAddresses(options.address),
          .channels = options.channels,
          .connections =
              std::make_unique<GrpcTransport>(GrpcTransport::Options{.channels = options.channels,
                                                                     .client_id = options.client_id,
                                                                     .token = options.token,
                                                                     .security = security}),
          .unit_random = UnitRandom};
}

/// Returns whether the client has exactly one server for its lifetime, so that rows may lie in
/// memory that only this server reads.
bool IsOneServer(const Client::Options& options) {
  return AddressBook(*ParseAddresses(options.address)).is_plain();
}

/// Returns the size in bytes of a region that holds all requests in flight of a call, without
/// overflow. The server's limits may reduce it.
int64_t RegionBytes(const Client::Options& options) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 2;
  return std::min(options.request_bytes, kMost / options.max_inflight) * options.max_inflight;
}

/// Returns the options of the same-host transport. `options` must have been checked.
LocalTransport::Options LocalOptions(const Client::Options& options,
                                     std::function<absl::Time()> now) {
  const std::vector<std::string> addresses = *ParseAddresses(options.address);
  const bool is_unix =
      std::all_of(addresses.begin(), addresses.end(),
                  [](const std::string& address) { return absl::StartsWith(address, "unix"); });
  LocalTransport::Options local = {.choice = options.transport.value_or(TransportChoice::kAuto),
                                   .inline_transport = is_unix ? Transport::kUnix : Transport::kTcp,
                                   .address = options.address,
                                   .client_id = options.client_id,
                                   .region_bytes = RegionBytes(options),
                                   .now = std::move(now)};
  if (!IsOneServer(options)) {
    local.choice = TransportChoice::kTcp;
    local.tcp_reason = "with several servers, rows are sent inside requests";
  }
  return local;
}

}  // namespace

struct Client::Impl {
  Impl(Options client_options, const ChannelSecurity& security)
      : options(std::move(client_options)),
        transport(TransportOptions(options, security)),
        environment({.transport = &transport,
                     .retry = {.attempts_max = options.attempts_max,
                               .overloaded_attempts_max = options.overloaded_attempts_max,
                               .backoff_initial = options.backoff_initial,
                               .backoff_max = options.backoff_max},
                     .address = options.address,
                     .unit_random = UnitRandom,
                     .balance = &transport.balance(),
                     .mix_weights_versions = options.mix_weights_versions,
                     .on_wait = options.on_wait}),
        single_try(environment),
        local(LocalOptions(options, [this] { return transport.Now(); })) {
    single_try.retry.attempts_max = single_try.retry.overloaded_attempts_max = 1;
    single_try.on_wait = nullptr;
  }

  absl::Time DeadlineAfter(absl::Duration timeout) const { return transport.Now() + timeout; }

  /// Sends one request and waits for its outcome.
  CallOutcome CallAndWait(const CallEnvironment& call_environment, std::string method,
                          std::function<grpc::ByteBuffer()> request, absl::Duration timeout) {
    CallOutcome outcome;
    const auto queue = std::make_shared<CallerQueue>();
    const std::shared_ptr<CancelScope> scope = transport.NewScope();
    scope->queue = queue;
    StartRetryingCall(call_environment,
                      {.method = std::move(method),
                       .request = std::move(request),
                       .deadline = DeadlineAfter(timeout),
                       .timeout = timeout,
                       .scope = scope},
                      [&outcome, queue](CallOutcome result) {
                        outcome = std::move(result);
                        queue->End();
                      });
    queue->Wait();
    return outcome;
  }

  /// Polls the queue until `busy_poll` has passed or nothing is outstanding. Only one thread polls
  /// at a time, so that callers do not take the cores from the threads that receive responses.
  void BusyPoll(CallerQueue& queue) {
    if (options.busy_poll <= absl::ZeroDuration() ||
        is_polling.exchange(true, std::memory_order_relaxed)) {
      return;
    }
    const absl::Time until = transport.Now() + options.busy_poll;
    while (!queue.Poll() && transport.Now() < until) std::this_thread::yield();
    is_polling.store(false, std::memory_order_relaxed);
  }

  void BeginCall() {
    const absl::MutexLock lock(&mutex);
    ++calls;
  }
  void EndCall() {
    const absl::MutexLock lock(&mutex);
    --calls;
  }

  std::shared_ptr<const ServerInfo> CachedInfo() {
    const absl::MutexLock lock(&mutex);
    return info;
  }

  void SetInfo(std::shared_ptr<const ServerInfo> new_info) {
    if (new_info != nullptr) local.Offer(new_info->local);
    const absl::MutexLock lock(&mutex);
    info = std::move(new_info);
  }

  /// Scores with known limits. `queue` is null if no thread waits for the call.
  void Start(const ScoreArgs& args, const ServerInfo& server, absl::Time deadline,
             absl::Duration timeout, const std::shared_ptr<CallerQueue>& queue,
             ScoreCallback done) {
    StartScoreCall(environment, args,
                   {.limits = FindLimits(server, args.head),
                    .request_bytes = options.request_bytes,
                    .max_inflight = options.max_inflight,
                    .deadline = deadline,
                    .timeout = timeout,
                    .local = &local,
                    .queue = queue},
                   [this, done = std::move(done)](absl::StatusOr<ScoreResult> result) mutable {
                     // The server may have restarted with other limits: the next call asks for them
                     // again.
                     if (!result.ok()) SetInfo(nullptr);
                     std::move(done)(std::move(result));
                   });
  }

  /// Asks for the limits if they are not known, and scores.
  void Score(const ScoreArgs& args, const std::shared_ptr<CallerQueue>& queue, ScoreCallback done);

  const Options options;
  BalancingTransport transport;
  CallEnvironment environment;
  CallEnvironment single_try;  ///< `environment` without retries, for callers that loop.
  LocalTransport local;
  std::atomic<bool> is_polling = false;

  absl::Mutex mutex;
  std::shared_ptr<const ServerInfo> info ABSL_GUARDED_BY(mutex);  ///< Null if it must be requested.
  int64_t calls ABSL_GUARDED_BY(mutex) = 0;  ///< Number of calls that still use the client.
};

absl::StatusOr<std::unique_ptr<Client>> Client::Create(const Options& options) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  Options chosen = options;
  if (const char* variable = std::getenv("LOGPROBD_TRANSPORT");
      !chosen.transport.has_value() && variable != nullptr && *variable != '\0') {
    absl::StatusOr<TransportChoice> choice = ParseTransportChoice(variable);
    if (!choice.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("LOGPROBD_TRANSPORT: ", choice.status().message()));
    }
    chosen.transport = *choice;
  }
  const TransportChoice choice = chosen.transport.value_or(TransportChoice::kAuto);
  if (!IsOneServer(chosen) &&
      (choice == TransportChoice::kSharedMemory || choice == TransportChoice::kCudaIpc)) {
    return absl::InvalidArgumentError(absl::StrCat(
        options.transport.has_value() ? "transport" : "LOGPROBD_TRANSPORT", " is ",
        choice == TransportChoice::kCudaIpc ? "cuda-ipc" : "shm", ", and address \"",
        chosen.address,
        "\" names several servers, to which rows are sent inside requests: use auto or tcp, "
        "or name one server"));
  }
  absl::StatusOr<ChannelSecurity> security = ReadTls(chosen.tls);
  if (!security.ok()) return security.status();
  return std::unique_ptr<Client>(new Client(std::make_unique<Impl>(chosen, *security)));
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Client::~Client() {
  impl_->transport.Shutdown();
  impl_->local.Close();
  const absl::MutexLock lock(&impl_->mutex);
  impl_->mutex.Await(absl::Condition(
      +[](int64_t* calls) { return *calls == 0; }, &impl_->calls));
}

absl::StatusOr<ScoreResult> Client::Score(const ScoreArgs& args) {
  absl::StatusOr<ScoreResult> result;
  const auto queue = std::make_shared<CallerQueue>();
  impl_->BeginCall();  // otherwise the client could be destroyed as soon as the call has ended
  impl_->Score(args, queue, [&result, queue](absl::StatusOr<ScoreResult> scored) {
    result = std::move(scored);
    queue->End();
  });
  impl_->BusyPoll(*queue);
  impl_->EndCall();  // from here on only the queue is used, which belongs to this thread
  queue->Wait();
  return result;
}

void Client::ScoreAsync(const ScoreArgs& args, ScoreCallback done) {
  impl_->Score(args, nullptr, std::move(done));
}

void Client::Impl::Score(const ScoreArgs& args, const std::shared_ptr<CallerQueue>& queue,
                         ScoreCallback done) {
  const absl::Duration timeout = args.timeout.value_or(options.timeout);
  absl::Status status = CheckScoreArgs(args);
  if (timeout <= absl::ZeroDuration()) {
    status.Update(absl::InvalidArgumentError(
        absl::StrCat("timeout is ", absl::FormatDuration(timeout), ", must be above 0")));
  }
  if (!status.ok()) {
    std::move(done)(status);
    return;
  }
  BeginCall();
  auto counted_done = [this, done = std::move(done)](absl::StatusOr<ScoreResult> result) mutable {
    std::move(done)(std::move(result));
    EndCall();
  };
  const absl::Time deadline = DeadlineAfter(timeout);
  if (const std::shared_ptr<const ServerInfo> cached = CachedInfo(); cached != nullptr) {
    Start(args, *cached, deadline, timeout, queue, std::move(counted_done));
    return;
  }
  const std::shared_ptr<CancelScope> scope = transport.NewScope();
  scope->queue = queue;
  StartRetryingCall(environment,
                    {.method = kListHeadsMethod,
                     .request = EncodeListHeads,
                     .deadline = deadline,
                     .timeout = timeout,
                     .scope = scope},
                    [this, args, deadline, timeout, queue,
                     done = std::move(counted_done)](const CallOutcome& outcome) mutable {
                      if (!outcome.status.ok()) {
                        std::move(done)(outcome.status);
                        return;
                      }
                      absl::StatusOr<ServerInfo> parsed = ParseListHeads(outcome.body);
                      if (!parsed.ok()) {
                        std::move(done)(parsed.status());
                        return;
                      }
                      transport.LowerLimits(*parsed);
                      auto fresh = std::make_shared<const ServerInfo>(*std::move(parsed));
                      SetInfo(fresh);
                      Start(args, *fresh, deadline, timeout, queue, std::move(done));
                    });
}

absl::StatusOr<ServerInfo> Client::ListHeads() {
  CallOutcome outcome = impl_->CallAndWait(impl_->environment, kListHeadsMethod, EncodeListHeads,
                                           impl_->options.timeout);
  if (!outcome.status.ok()) return outcome.status;
  absl::StatusOr<ServerInfo> info = ParseListHeads(outcome.body);
  if (!info.ok()) return info;
  impl_->local.Offer(info->local);
  impl_->transport.LowerLimits(*info);
  return info;
}

Transport Client::transport() const { return impl_->local.last(); }

std::string Client::transport_reason() const { return impl_->local.last_reason(); }

absl::StatusOr<RowBuffer> Client::AllocateRows(int64_t bytes) {
  if (impl_->CachedInfo() == nullptr) {
    absl::StatusOr<ServerInfo> info = ListHeads();
    if (!info.ok()) return info.status();
    impl_->SetInfo(std::make_shared<const ServerInfo>(*std::move(info)));
  }
  return impl_->local.AllocateRows(bytes);
}

std::vector<ServerState> Client::Servers() const { return impl_->transport.balance().states(); }

absl::StatusOr<VerifyReport> Client::Verify(const VerifyArgs& args) {
  CallOutcome outcome = impl_->CallAndWait(
      impl_->environment, kVerifyMethod, [&args] { return EncodeVerify(args); },
      impl_->options.timeout);
  if (!outcome.status.ok()) return outcome.status;
  return ParseVerify(outcome.body);
}

absl::StatusOr<bool> Client::Ready() {
  // With several servers, a retry would ask servers that just said that they are not ready.
  const bool is_one = impl_->transport.balance().is_solo();
  const CallOutcome outcome = impl_->CallAndWait(
      is_one ? impl_->environment : impl_->single_try, kHealthMethod,
      [] { return EncodeHealthRequest(kScoringService); }, impl_->options.timeout);
  if (!outcome.status.ok()) return outcome.status;
  return IsServing(outcome.body);
}

absl::Status Client::WaitReady(absl::Duration timeout) {
  const absl::Time deadline = impl_->DeadlineAfter(timeout);
  const absl::Time begin = impl_->transport.Now();
  std::string last;
  bool is_reported = false;
  absl::Duration pause = policy::kReadyPauseFirst;
  while (true) {
    const absl::Duration remaining = deadline - impl_->transport.Now();
    if (remaining <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(absl::StrCat(
          impl_->options.address, " was not ready within ", absl::FormatDuration(timeout), ": ",
          last.empty() ? "it was not asked" : last));
    }
    const CallOutcome outcome = impl_->CallAndWait(
        impl_->single_try, kHealthMethod, [] { return EncodeHealthRequest(kScoringService); },
        std::min(remaining, policy::kCheckTimeout));
    // Waiting does not help with another kind of server, or with servers whose heads differ.
    if (absl::IsUnimplemented(outcome.status) || absl::IsFailedPrecondition(outcome.status)) {
      return outcome.status;
    }
    if (outcome.status.ok()) {
      const absl::StatusOr<bool> serving = IsServing(outcome.body);
      if (!serving.ok()) return serving.status();
      if (*serving) return absl::OkStatus();
      last = "it answers, but is not serving yet (loading, or shutting down)";
    } else if (last.empty() || remaining >= policy::kCheckTimeout ||
               !absl::IsDeadlineExceeded(outcome.status)) {
      // A check that this deadline cut short says less than the one before.
      last = std::string(outcome.status.message());
    }
    if (!is_reported && impl_->options.on_wait &&
        impl_->transport.Now() - begin >= policy::kNotice) {
      is_reported = true;
      impl_->options.on_wait(absl::StrCat("waiting for ", impl_->options.address, ": ", last));
    }
    absl::SleepFor(
        std::min(pause, std::max(absl::ZeroDuration(), deadline - impl_->transport.Now())));
    pause = std::min(policy::kReadyPauseMax, pause * 1.5);
  }
}

}  // namespace logprobd::client
