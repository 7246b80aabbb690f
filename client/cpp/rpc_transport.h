#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

namespace logprobd::client {

class CallVersions;
class CallerQueue;

/// Outcome of a request.
struct RpcReply {
  absl::Status status = absl::OkStatus();
  grpc::ByteBuffer body = {};  ///< Response, if `status` is OK.
  /// The server's hint (grpc-retry-pushback-ms), if sent: the least wait before the next attempt. A
  /// negative one forbids it.
  std::optional<absl::Duration> pushback = {};
  std::string server = {};        ///< Address of the server that was asked; empty if none was.
  bool can_go_elsewhere = false;  ///< Another server is ready, so a retry need not wait.
  bool is_explained = false;      ///< The message already says what to change.
};

using RpcDone = absl::AnyInvocable<void(RpcReply) &&>;

/// Requests and delays that are cancelled together.
class CancelScope {
 public:
  virtual ~CancelScope() = default;
  /// Ends requests in flight and requests sent later with CANCELLED, and ends delays now. May be
  /// called from any thread.
  virtual void Cancel() = 0;
  virtual bool is_cancelled() = 0;

  /// Restricts the servers to which the requests may be sent; null allows any server. Must be set
  /// before the first request.
  std::shared_ptr<CallVersions> versions;
  /// Queue from which the caller receives responses; if it is null, threads of the transport
  /// receive them. Must be set before the first request.
  std::shared_ptr<CallerQueue> queue;
  /// W3C traceparent that is sent with each Score request; empty means none. Must be set before the
  /// first request.
  std::string traceparent;
};

/// An encoded request.
struct RpcRequest {
  std::string method;     ///< "/package.Service/Method".
  grpc::ByteBuffer body;  ///< The transport takes it.
  absl::Time deadline;    ///< On the transport's clock.
  std::shared_ptr<CancelScope> scope;
  std::string server = {};  ///< Address; empty if the transport chooses the server.
};

/// Sends encoded requests and provides a clock. It is implemented over gRPC and faked in tests.
/// Thread-safe.
class RpcTransport {
 public:
  virtual ~RpcTransport() = default;

  virtual std::shared_ptr<CancelScope> NewScope() = 0;

  /// Sends a request. `done` is called once: on a thread of the transport, on the thread that waits
  /// on the scope's queue, or, for a cancelled scope, before this returns.
  virtual void Call(RpcRequest&& request, RpcDone done) = 0;

  /// Calls `callback` once, on a thread of the transport, after `delay` or when `scope` (which may
  /// be null) is cancelled.
  virtual void After(absl::Duration delay, const std::shared_ptr<CancelScope>& scope,
                     absl::AnyInvocable<void() &&> callback) = 0;

  /// Returns the monotonic time, with an arbitrary epoch.
  virtual absl::Time Now() const = 0;

  /// Returns the number of servers that take requests now, at least 1. Starts checks that are due.
  virtual int64_t CountServers() { return 1; }

  /// Closes the connections to all servers but these, once they have no request in flight.
  virtual void KeepServers(const std::vector<std::string>&) {}

  /// Cancels requests in flight and timers, and waits for their callbacks. Later calls end with
  /// CANCELLED.
  virtual void Shutdown() {}
};

}  // namespace logprobd::client
