#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

namespace logprobd::client {

class CallVersions;
class CallerQueue;

/// Outcome of a request.
struct RpcReply {
  absl::Status status = absl::OkStatus();
  grpc::ByteBuffer body = {};                ///< Response, if `status` is OK.
  std::optional<std::string> pushback = {};  ///< Value of grpc-retry-pushback-ms, if sent.
  std::string server = {};        ///< Address of the server; empty if there is only one server.
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

/// Sends encoded requests and provides a clock. It is implemented over gRPC and faked in tests.
/// Thread-safe.
class RpcTransport {
 public:
  virtual ~RpcTransport() = default;

  virtual std::shared_ptr<CancelScope> NewScope() = 0;

  /// Sends `request` to `method` ("/package.Service/Method"). `done` is called once: on a thread of
  /// the transport, on the thread that waits on the scope's queue, or, for a cancelled scope,
  /// before this returns. `deadline` is on this transport's clock.
  virtual void Call(const std::string& method, grpc::ByteBuffer request, absl::Time deadline,
                    const std::shared_ptr<CancelScope>& scope, RpcDone done) = 0;

  /// Calls `callback` once, on a thread of the transport, after `delay` or when `scope` (which may
  /// be null) is cancelled.
  virtual void After(absl::Duration delay, const std::shared_ptr<CancelScope>& scope,
                     absl::AnyInvocable<void() &&> callback) = 0;

  /// Returns the monotonic time, with an arbitrary epoch.
  virtual absl::Time Now() const = 0;

  /// Returns the number of servers that take requests now, at least 1. Starts checks that are due.
  virtual int64_t CountServers() { return 1; }

  /// Cancels requests in flight and timers, and waits for their callbacks. Later calls end with
  /// CANCELLED.
  virtual void Shutdown() {}
};

/// Callbacks of a stream, called one at a time, on threads of the transport.
struct StreamEvents {
  absl::AnyInvocable<void(const grpc::ByteBuffer&)> received;
  /// Called once, as the last callback. OK means that the server ended the stream. References to
  /// the stream must be released before this returns.
  absl::AnyInvocable<void(const absl::Status&) &&> ended;
};

/// A bidirectional call that carries encoded messages. It is implemented over gRPC and faked in
/// tests. Thread-safe. Its functions do not call StreamEvents themselves.
class MessageStream {
 public:
  virtual ~MessageStream() = default;
  /// Begins the call. Must be called once.
  virtual void Start() = 0;
  /// Queues a message. Messages are sent in this order; after the stream has ended they are
  /// dropped.
  virtual void Write(grpc::ByteBuffer message) = 0;
  /// Withdraws an unsent message and releases its memory. `index` is the position of the message in
  /// the order of Write, from 0. Returns false if the connection has started to send the message.
  virtual bool Withdraw(int64_t index) = 0;
  /// Declares that no more messages follow: the server ends the stream when it has answered all
  /// messages.
  virtual void CloseWrites() = 0;
  /// Ends the stream soon, with CANCELLED.
  virtual void Cancel() = 0;
  /// Returns the number of messages given to Write that the connection has taken, including
  /// withdrawn ones.
  virtual int64_t written() const = 0;
};

/// Opens streams to the server.
class StreamOpener {
 public:
  virtual ~StreamOpener() = default;
  /// Returns a stream of `method` ("/package.Service/Method"), which the caller starts. Returns
  /// null after shutdown; then no event is called.
  virtual std::shared_ptr<MessageStream> OpenStream(const std::string& method,
                                                    StreamEvents events) = 0;
};

}  // namespace logprobd::client
