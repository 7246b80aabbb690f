#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

namespace logprobd::client {

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
  virtual bool Withdraw(int64_t place) = 0;
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
