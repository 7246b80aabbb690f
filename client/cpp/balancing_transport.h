#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/addresses.h"
#include "client/cpp/balance.h"
#include "client/cpp/rpc_transport.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// RpcTransport that chooses the server of each request with Balance.
///
/// A server is used once a check has succeeded (server_check.h). Calls start the checks and DNS
/// look-ups that are due; nothing runs between calls. A request that finds no ready server starts
/// checks and waits for them. If no check succeeds, the request fails with UNAVAILABLE, and the
/// message gives the reason for each server.
///
/// The caller's ListHeads and health checks ask all servers. If there is one address and it is not
/// a DNS name, every request goes straight to that server.
class BalancingTransport final : public RpcTransport {
 public:
  struct Options {
    std::vector<std::string> addresses;         ///< From ParseAddresses.
    int32_t channels = 1;                       ///< Number of connections to each server.
    std::unique_ptr<RpcTransport> connections;  ///< Sends requests to the server that they name.
    Resolver resolve = ResolveName;
    std::function<double()> unit_random;  ///< Returns numbers in [0, 1); thread-safe.
  };

  explicit BalancingTransport(Options options);
  /// Calls Shutdown(); may wait for the look-up of a name.
  ~BalancingTransport() override;

  std::shared_ptr<CancelScope> NewScope() override;
  void Call(RpcRequest&& request, RpcDone done) override;
  void After(absl::Duration delay, const std::shared_ptr<CancelScope>& scope,
             absl::AnyInvocable<void() &&> callback) override;
  absl::Time Now() const override;
  int64_t CountServers() override;
  void Shutdown() override;

  Balance& balance() { return balance_; }
  const Balance& balance() const { return balance_; }

  /// Lowers the limits of `info` to the tightest ones of all ready servers.
  void LowerLimits(ServerInfo& info) const;

 private:
  struct Request;
  struct Waiter;

  /// Sends to the next server. If none is ready and `may_wait`, waits for one.
  void Send(std::shared_ptr<Request> request, bool may_wait);
  void Receive(Request& request, const Balance::Taken& taken, int64_t bytes, RpcReply reply);
  /// Tells the balance about a failure, and sets whether the request can go to another server.
  void TakeNoteOfFailure(const Request& request, const std::string& address, RpcReply& reply);
  void Fail(Request& request, absl::Status status);
  bool FailIfShutDown(Request& request);
  /// Whether the caller or Shutdown has cancelled the request.
  bool IsGivenUp(const Request& request);

  /// Answers the caller's ListHeads or health check from the state of all servers.
  void AnswerForAll(Request& request);

  /// Starts the checks and look-ups that are due.
  void Refresh(Balance::Due due);
  /// Calls `then` once all running checks have ended, policy::kFirstLook after the first server is
  /// ready, or at the deadline, whichever is first.
  void AwaitServers(absl::Time deadline, const std::shared_ptr<CancelScope>& scope,
                    absl::AnyInvocable<void() &&> then);
  void EndWaits();
  void StartCheck(const std::string& address);
  void StartLookUp();
  void LookUp();
  std::vector<std::string> LookUpErrors() const;

  Options options_;

  mutable absl::Mutex mutex_;
  AddressBook book_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Waiter>> waiters_ ABSL_GUARDED_BY(mutex_);
  bool is_looking_up_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread look_up_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer listed_ ABSL_GUARDED_BY(mutex_);  // the latest answer to ListHeads

  Balance balance_;
};

}  // namespace logprobd::client
