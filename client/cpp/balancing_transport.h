#pragma once

#include <cstdint>
#include <functional>
#include <map>
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

/// RpcTransport over several servers, each with a transport of its own; Balance says which is next.
///
/// A server is used once a check has found it well (server_check.h). Checks and look-ups of names
/// are begun by calls, when they are due; nothing runs while nobody calls. A request that finds no
/// server ready waits until the checks then begun have ended, and fails as UNAVAILABLE, naming each
/// server and why, when none is well.
///
/// ListHeads and health checks of the caller ask all servers. With one plain address everything
/// goes straight to that server.
class BalancingTransport final : public RpcTransport {
 public:
  /// Once one server is ready, how long others may still take to show that they are.
  static constexpr absl::Duration kFirstLook = absl::Seconds(1);

  struct Options {
    std::vector<std::string> addresses;  ///< As ParseAddresses gives them.
    int32_t channels = 1;                ///< Connections of a server's transport.
    /// Makes the transport to an address.
    std::function<std::unique_ptr<RpcTransport>(const std::string& address)> connect;
    /// For delays and the time.
    std::unique_ptr<RpcTransport> timers;
    Resolver resolve = ResolveName;
    std::function<double()> unit_random;  ///< In [0, 1), thread-safe.
  };

  explicit BalancingTransport(Options options);
  /// Shutdown(); may wait for a look-up of a name to end.
  ~BalancingTransport() override;

  std::shared_ptr<CancelScope> NewScope() override;
  void Call(const std::string& method, grpc::ByteBuffer request, absl::Time deadline,
            const std::shared_ptr<CancelScope>& scope, RpcDone done) override;
  void After(absl::Duration delay, const std::shared_ptr<CancelScope>& scope,
             absl::AnyInvocable<void() &&> callback) override;
  absl::Time Now() const override;
  int64_t CountServers() override;
  void Shutdown() override;

  Balance& balance() { return balance_; }
  const Balance& balance() const { return balance_; }

  /// Lowers the limits to those that every ready server keeps.
  void Tighten(ServerInfo& info) const;

 private:
  class Scope;
  struct Request;
  struct Waiter;
  /// A server's transport. Outlives the server's place in the balance while requests are in flight.
  struct Connection {
    std::unique_ptr<RpcTransport> transport;
    int64_t inflight = 0;
  };

  /// Sends to the server that is next; waits for one where none is ready and `may_wait`.
  void Send(std::shared_ptr<Request> request, bool may_wait);
  void Receive(Request& request, const std::string& address, int64_t bytes, RpcReply reply);
  /// Judges a failure: whether the server is left, and whether the request can go elsewhere.
  void TakeNoteOfFailure(const Request& request, const std::string& address, RpcReply& reply);
  /// The transport to a server, for a request that ends with Disconnect; null once shut down.
  RpcTransport* Connect(const std::string& address);
  void Disconnect(const std::string& address);
  /// As Connect, but only to `transport`; false when it is no more the one of this address.
  bool ConnectAgain(const std::string& address, const RpcTransport* transport);
  void Fail(Request& request, absl::Status status);
  bool FailIfShutDown(Request& request);
  /// Whether its caller, or Shutdown, has cancelled it.
  bool IsGivenUp(const Request& request);

  /// Answers ListHeads and health checks of the caller from what all servers say.
  void AnswerForAll(Request& request);

  /// Begins the checks and look-ups that are due.
  void Refresh(Balance::Due due);
  /// Calls `then` once the checks under way have ended, or kFirstLook after the first server was
  /// ready, or at the deadline.
  void Gather(absl::Time deadline, const std::shared_ptr<CancelScope>& scope,
              absl::AnyInvocable<void() &&> then);
  void Settle();
  void StartCheck(const std::string& address);
  void StartLookUp();
  void LookUp();
  std::vector<std::string> LookUpErrors() const;

  Options options_;

  mutable absl::Mutex mutex_;
  AddressBook book_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Connection> connections_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Waiter>> waiters_ ABSL_GUARDED_BY(mutex_);
  bool is_looking_up_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread look_up_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer listed_ ABSL_GUARDED_BY(mutex_);  // the latest answer to ListHeads

  Balance balance_;
};

}  // namespace logprobd::client
