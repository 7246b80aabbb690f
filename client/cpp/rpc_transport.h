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

/// How a request ended.
struct RpcReply {
  absl::Status status = absl::OkStatus();
  grpc::ByteBuffer body = {};                ///< When `status` is OK.
  std::optional<std::string> pushback = {};  ///< Value of grpc-retry-pushback-ms, if sent.
  std::string server = {};        ///< Address that it went to; empty where there is one for good.
  bool can_go_elsewhere = false;  ///< Another server is ready for it: there is no need to wait.
  bool is_explained = false;      ///< The message already says what to change.
};

using RpcDone = absl::AnyInvocable<void(RpcReply) &&>;

/// Requests and delays that are given up together.
class CancelScope {
 public:
  virtual ~CancelScope() = default;
  /// Ends requests in flight, and those sent later, with CANCELLED; delays end now. Any thread.
  virtual void Cancel() = 0;

  /// Which of several servers the requests may go to; null: any. Set before the first one is sent.
  std::shared_ptr<CallVersions> versions;
  /// Where the caller takes up the answers; null: threads of the transport do. Set as `versions`.
  std::shared_ptr<CallerQueue> queue;
};

/// Sends encoded requests and tells the time: gRPC, or a fake in tests. Thread-safe.
class RpcTransport {
 public:
  virtual ~RpcTransport() = default;

  virtual std::shared_ptr<CancelScope> NewScope() = 0;

  /// Sends `request` to `method` ("/package.Service/Method"); `done` is called once, on a thread of
  /// the transport or the one that waits on the scope's queue or, for a cancelled scope, before
  /// this returns. `deadline` is on this transport's clock.
  virtual void Call(const std::string& method, grpc::ByteBuffer request, absl::Time deadline,
                    const std::shared_ptr<CancelScope>& scope, RpcDone done) = 0;

  /// Calls `callback` once, on a thread of the transport, after `delay` or when `scope` (which may
  /// be null) is cancelled.
  virtual void After(absl::Duration delay, const std::shared_ptr<CancelScope>& scope,
                     absl::AnyInvocable<void() &&> callback) = 0;

  /// Monotonic, with an arbitrary epoch.
  virtual absl::Time Now() const = 0;

  /// Servers that take requests now, at least 1. Begins the checks of servers that are due.
  virtual int64_t CountServers() { return 1; }

  /// Cancels what is in flight and all timers and waits for their callbacks. Calls made from then
  /// on end with CANCELLED.
  virtual void Shutdown() {}
};

/// What happens on a stream: called one at a time, on threads of the transport.
struct StreamEvents {
  absl::AnyInvocable<void(const grpc::ByteBuffer&)> received;
  /// Once, last. OK: the server ended the stream.
  absl::AnyInvocable<void(const absl::Status&) &&> ended;
};

/// A bidirectional call that carries encoded messages: gRPC, or a fake in tests. Thread-safe. No
/// event is called from within these functions.
class MessageStream {
 public:
  virtual ~MessageStream() = default;
  /// Begins the call; to be called once.
  virtual void Start() = 0;
  /// Queues a message. Messages leave in this order; those of a stream that has ended are dropped.
  virtual void Write(grpc::ByteBuffer message) = 0;
  /// Takes the `place`th message given to Write, counted from 0, back before it is sent, and lets
  /// its memory go. False: the connection has begun to take it.
  virtual bool Withdraw(int64_t index) = 0;
  /// No more messages: the server ends the stream when it has answered what it has.
  virtual void CloseWrites() = 0;
  /// Ends the stream soon, with CANCELLED.
  virtual void Cancel() = 0;
  /// How many of the messages given to Write the connection has taken, with those withdrawn.
  virtual int64_t written() const = 0;
};

/// Opens streams to the server.
class StreamOpener {
 public:
  virtual ~StreamOpener() = default;
  /// A stream of `method` ("/package.Service/Method"), to be started by the caller. Null once shut
  /// down; then no event is called.
  virtual std::shared_ptr<MessageStream> OpenStream(const std::string& method,
                                                    StreamEvents events) = 0;
};

}  // namespace logprobd::client
