#include "client/cpp/balancing_transport.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/balance.h"
#include "client/cpp/call_versions.h"
#include "client/cpp/policy.h"
#include "client/cpp/retrying_call.h"
#include "client/cpp/server_check.h"
#include "client/cpp/server_messages.h"

namespace logprobd::client {

struct BalancingTransport::Request {
  RpcRequest rpc;
  RpcDone done;

  CallVersions* versions() const { return rpc.scope->versions.get(); }
  ServerPreference preference() const {
    return versions() == nullptr ? ServerPreference{} : versions()->preference();
  }
};

/// A request that waits for servers to become ready.
struct BalancingTransport::Waiter {
  absl::Time began;
  absl::AnyInvocable<void() &&> then;  // null after the call
};

BalancingTransport::BalancingTransport(Options options)
    : options_(std::move(options)),
      book_(options_.addresses),
      balance_({.solo = AddressBook(options_.addresses).is_plain(),
                .now = [this] { return Now(); },
                .unit_random = options_.unit_random},
               AddressBook(options_.addresses).servers()) {}

BalancingTransport::~BalancingTransport() { Shutdown(); }

std::shared_ptr<CancelScope> BalancingTransport::NewScope() {
  return options_.connections->NewScope();
}

void BalancingTransport::After(absl::Duration delay, const std::shared_ptr<CancelScope>& scope,
                               absl::AnyInvocable<void() &&> callback) {
  options_.connections->After(delay, scope, std::move(callback));
}

absl::Time BalancingTransport::Now() const { return options_.connections->Now(); }

int64_t BalancingTransport::CountServers() {
  if (balance_.is_solo()) return 1;
  Refresh(Balance::Due::kTimely);
  return std::max<int64_t>(1, static_cast<int64_t>(balance_.ready().size()));
}

void BalancingTransport::LowerLimits(ServerInfo& info) const {
  if (balance_.is_solo()) return;
  if (const absl::StatusOr<ServerInfo> heads = balance_.Heads({}); heads.ok()) {
    info = TightestLimits({info, *heads});
  }
}

void BalancingTransport::Call(RpcRequest&& request, RpcDone done) {
  grpc::ByteBuffer body;  // a moved ByteBuffer would keep its references to the caller's memory
  body.Swap(&request.body);
  auto own = std::make_shared<Request>(Request{.rpc = std::move(request), .done = std::move(done)});
  own->rpc.body.Swap(&body);
  if (FailIfShutDown(*own)) return;
  if (balance_.is_solo()) {
    Send(std::move(own), /*may_wait=*/false);
    return;
  }
  if (own->rpc.method == kListHeadsMethod || own->rpc.method == kHealthMethod) {
    Refresh(Balance::Due::kAll);
    AwaitServers(own->rpc.deadline, own->rpc.scope, [this, own] { AnswerForAll(*own); });
    return;
  }
  Refresh(Balance::Due::kTimely);
  Send(std::move(own), /*may_wait=*/true);
}

void BalancingTransport::Send(std::shared_ptr<Request> request, bool may_wait) {
  const auto bytes = static_cast<int64_t>(request->rpc.body.Length());
  CallVersions* const versions = request->versions();
  absl::StatusOr<std::optional<Balance::Taken>> taken = balance_.Take(bytes, request->preference());
  if (taken.ok() && !taken->has_value() && versions != nullptr) {
    const absl::StatusOr<bool> stuck = versions->Stuck();
    if (!stuck.ok()) {
      Fail(*request, stuck.status());
      return;
    }
    if (*stuck) taken = balance_.Take(bytes, request->preference());
  }
  if (!taken.ok()) {
    Fail(*request, taken.status());
    return;
  }
  if (!taken->has_value()) {
    if (may_wait) {
      Refresh(Balance::Due::kIdle);
      const absl::Time deadline = request->rpc.deadline;
      const std::shared_ptr<CancelScope> scope = request->rpc.scope;
      AwaitServers(deadline, scope, [this, request = std::move(request)]() mutable {
        Send(std::move(request), /*may_wait=*/false);
      });
      return;
    }
    if (FailIfShutDown(*request)) return;
    const absl::Status gone = balance_.Heads(LookUpErrors()).status();
    // A server may have become ready at this moment: the retry will find it.
    std::move(request->done)(
        {.status = gone.ok() ? absl::UnavailableError("no server was ready") : gone});
    return;
  }
  if (versions != nullptr) versions->Asked(**taken);
  RpcRequest rpc = {.method = request->rpc.method,
                    .body = {},
                    .deadline = request->rpc.deadline,
                    .scope = request->rpc.scope,
                    .server = (*taken)->address};
  // The request keeps no reference: the caller's memory is released when the transport is done.
  rpc.body.Swap(&request->rpc.body);
  options_.connections->Call(std::move(rpc),
                             [this, request, taken = **taken, bytes](RpcReply reply) {
                               Receive(*request, taken, bytes, std::move(reply));
                             });
}

void BalancingTransport::Receive(Request& request, const Balance::Taken& taken, int64_t bytes,
                                 RpcReply reply) {
  balance_.Release(taken, bytes);
  // This client did not cancel the request, so the server did, for example at the end of its drain.
  if (absl::IsCancelled(reply.status) && !IsGivenUp(request)) {
    reply.status = absl::UnavailableError(
        absl::StrCat("the server cancelled the request: ", reply.status.message()));
  }
  if (!reply.status.ok()) TakeNoteOfFailure(request, taken.address, reply);
  reply.server = taken.address;
  std::move(request.done)(std::move(reply));
}

void BalancingTransport::TakeNoteOfFailure(const Request& request, const std::string& address,
                                           RpcReply& reply) {
  CallVersions* const versions = request.versions();
  switch (reply.status.code()) {
    case absl::StatusCode::kUnavailable:
      balance_.Leave(address, ReasonOf(reply.status));
      break;
    case absl::StatusCode::kResourceExhausted:
      if (IsMessageTooLarge(reply.status)) return;
      balance_.Busy(address, reply.pushback);
      break;
    case absl::StatusCode::kFailedPrecondition:
      if (versions == nullptr || balance_.is_solo()) return;
      reply.can_go_elsewhere = versions->Lacks(address);
      if (!reply.can_go_elsewhere) {
        reply.status = versions->Mismatch();
        reply.is_explained = true;
      }
      return;
    default:
      return;
  }
  reply.can_go_elsewhere = !balance_.is_solo() && balance_.HasOther(address, request.preference());
}

bool BalancingTransport::IsGivenUp(const Request& request) {
  if (request.rpc.scope->is_cancelled()) return true;
  const absl::MutexLock lock(&mutex_);
  return is_shut_down_;
}

bool BalancingTransport::FailIfShutDown(Request& request) {
  {
    const absl::MutexLock lock(&mutex_);
    if (!is_shut_down_) return false;
  }
  Fail(request, absl::CancelledError("the client is shutting down"));
  return true;
}

void BalancingTransport::Fail(Request& request, absl::Status status) {
  std::move(request.done)({.status = std::move(status), .is_explained = true});
}

void BalancingTransport::AnswerForAll(Request& request) {
  if (FailIfShutDown(request)) return;
  RpcReply reply;
  const absl::StatusOr<ServerInfo> heads = balance_.Heads(LookUpErrors());
  reply.status = heads.status();
  reply.is_explained = heads.status().code() == absl::StatusCode::kFailedPrecondition;
  if (heads.ok() && request.rpc.method == kHealthMethod) reply.body = EncodeServing();
  if (heads.ok() && request.rpc.method == kListHeadsMethod) {
    const absl::MutexLock lock(&mutex_);
    reply.body = listed_;
  }
  std::move(request.done)(std::move(reply));
}

void BalancingTransport::Refresh(Balance::Due due) {
  bool looks_up = false;
  {
    const absl::Time last_left = balance_.last_left();
    const absl::MutexLock lock(&mutex_);
    looks_up = !is_shut_down_ && !is_looking_up_ && book_.TakeDue(Now(), last_left);
    is_looking_up_ = is_looking_up_ || looks_up;
  }
  if (looks_up) StartLookUp();
  for (const std::string& address : balance_.TakeDueChecks(due)) StartCheck(address);
}

void BalancingTransport::AwaitServers(absl::Time deadline,
                                      const std::shared_ptr<CancelScope>& scope,
                                      absl::AnyInvocable<void() &&> then) {
  auto waiter = std::make_shared<Waiter>(Waiter{.began = Now(), .then = std::move(then)});
  {
    const absl::MutexLock lock(&mutex_);
    waiters_.push_back(waiter);
  }
  const auto give_up = [this, waiter] {
    absl::AnyInvocable<void() &&> late;
    {
      const absl::MutexLock lock(&mutex_);
      waiters_.erase(std::remove(waiters_.begin(), waiters_.end(), waiter), waiters_.end());
      late = std::exchange(waiter->then, nullptr);
    }
    if (late != nullptr) std::move(late)();
  };
  if (deadline != absl::InfiniteFuture()) After(deadline - Now(), scope, give_up);
  After(policy::kFirstLook, scope, [this] { EndWaits(); });
  EndWaits();
}

void BalancingTransport::EndWaits() {
  std::vector<absl::AnyInvocable<void() &&>> due;
  {
    const bool is_ready = !balance_.ready().empty();
    const bool is_checking = balance_.num_checked() > 0;
    const absl::MutexLock lock(&mutex_);
    const bool has_all = !is_checking && !is_looking_up_;
    const absl::Time begun_by = Now() - policy::kFirstLook;
    for (auto waiter = waiters_.begin(); waiter != waiters_.end();) {
      if (has_all || (is_ready && (*waiter)->began <= begun_by)) {
        due.push_back(std::exchange((*waiter)->then, nullptr));
        waiter = waiters_.erase(waiter);
      } else {
        ++waiter;
      }
    }
  }
  for (absl::AnyInvocable<void() &&>& then : due) std::move(then)();
}

void BalancingTransport::StartCheck(const std::string& address) {
  const absl::Time began = Now();
  StartServerCheck(*options_.connections, address, options_.channels,
                   [this, address, began](const absl::StatusOr<ServerInfo>& info,
                                          const grpc::ByteBuffer& listed) {
                     if (info.ok()) {
                       const absl::MutexLock lock(&mutex_);
                       listed_ = listed;
                     }
                     balance_.Checked(address, info, began);
                     EndWaits();
                   });
}

void BalancingTransport::StartLookUp() {
  const absl::MutexLock lock(&mutex_);
  if (is_shut_down_) return;
  if (look_up_.joinable()) look_up_.join();  // it has ended, because is_looking_up_ was false
  look_up_ = std::thread([this] { LookUp(); });
}

void BalancingTransport::LookUp() {
  std::map<std::string, DnsName> names;
  {
    const absl::MutexLock lock(&mutex_);
    names = book_.names();
  }
  std::map<std::string, absl::StatusOr<std::vector<std::string>>> found;
  for (const auto& [address, name] : names) found.emplace(address, options_.resolve(name));
  std::vector<std::string> servers;
  {
    const absl::MutexLock lock(&mutex_);
    for (auto& [address, records] : found) book_.Update(address, std::move(records));
    servers = book_.servers();
  }
  balance_.SetAddresses(servers);
  options_.connections->KeepServers(servers);
  for (const std::string& address : balance_.TakeDueChecks(Balance::Due::kTimely)) {
    StartCheck(address);
  }
  {
    const absl::MutexLock lock(&mutex_);
    is_looking_up_ = false;
  }
  // EndWaits runs on another thread, because a waiting request may start the next look-up, which
  // joins this thread.
  After(absl::ZeroDuration(), nullptr, [this] { EndWaits(); });
}

std::vector<std::string> BalancingTransport::LookUpErrors() const {
  const absl::MutexLock lock(&mutex_);
  std::vector<std::string> errors;
  for (const auto& [address, error] : book_.errors()) {
    errors.push_back(absl::StrCat(address, ": ", error));
  }
  return errors;
}

void BalancingTransport::Shutdown() {
  std::thread look_up;
  {
    const absl::MutexLock lock(&mutex_);
    is_shut_down_ = true;
    look_up = std::move(look_up_);
  }
  if (look_up.joinable()) look_up.join();
  options_.connections->Shutdown();
}

}  // namespace logprobd::client
