#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "logprobd/v1/local.pb.h"
#include "server/transport/sockets.h"

namespace logprobd::testing {

/// The content of one packet.
struct ControlReply {
  v1::LocalReply message;
  FileDescriptor file;
};

/// A client of a control socket that sends single packets, so that a test can break every rule.
class ControlClient {
 public:
  /// Connects to the socket at `path`, or aborts.
  explicit ControlClient(const std::string& path);

  /// Sends `packet` unchanged, with `file` unless it is -1. Returns false if the server has closed
  /// the connection.
  bool Send(absl::string_view packet, int file = -1);
  /// Behaves like Send, but waits for room in the socket.
  bool SendWaiting(absl::string_view packet);
  bool Send(const v1::LocalRequest& request) { return Send(request.SerializeAsString()); }

  /// Blocks until the next packet arrives and returns it. Returns nullopt if the server has closed
  /// the connection.
  std::optional<ControlReply> Receive();
  bool IsClosed() { return !Receive().has_value(); }

  /// Sends a request and returns the reply, or aborts if there is none.
  ControlReply Call(const v1::LocalRequest& request);
  // These send a valid request and return the reply.
  v1::LocalReply Hello(const std::string& client_id = "test");
  ControlReply CreateRegion(uint64_t bytes);
  v1::LocalReply CloseRegion(const std::string& id);

  void Close() { socket_ = FileDescriptor(); }

 private:
  FileDescriptor socket_;
};

/// A region that a client has mapped. The destructor unmaps it.
class MappedRegion {
 public:
  /// Maps the region of `reply`, or aborts.
  explicit MappedRegion(const ControlReply& reply);
  ~MappedRegion();
  MappedRegion(const MappedRegion&) = delete;
  MappedRegion& operator=(const MappedRegion&) = delete;

  absl::Span<std::byte> bytes() { return bytes_; }
  const std::string& id() const { return id_; }

 private:
  std::string id_;
  absl::Span<std::byte> bytes_;
};

}  // namespace logprobd::testing
