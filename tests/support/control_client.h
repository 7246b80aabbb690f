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

/// What came in one packet.
struct ControlReply {
  v1::LocalReply message;
  FileDescriptor file;
};

/// A client of a control socket, packet by packet, so that a test can do everything wrong.
class ControlClient {
 public:
  /// Connects; aborts when it cannot.
  explicit ControlClient(const std::string& path);

  /// Sends `packet` as it is, with `file` unless it is -1; false when the server has closed.
  bool Send(absl::string_view packet, int file = -1);
  /// As Send, but waits for room.
  bool SendWaiting(absl::string_view packet);
  bool Send(const v1::LocalRequest& request) { return Send(request.SerializeAsString()); }

  /// Blocks for the next packet; nothing when the server has closed.
  std::optional<ControlReply> Receive();
  bool IsClosed() { return !Receive().has_value(); }

  /// The reply to a request; aborts when there is none.
  ControlReply Call(const v1::LocalRequest& request);
  /// The reply to what a valid request of the kind asks.
  v1::LocalReply Hello(const std::string& client_id = "test");
  ControlReply CreateRegion(uint64_t bytes);
  v1::LocalReply CloseRegion(const std::string& id);

  void Close() { socket_ = FileDescriptor(); }

 private:
  FileDescriptor socket_;
};

/// A region as a client maps it, for as long as this lives.
class MappedRegion {
 public:
  /// Of a reply with a region; aborts when it cannot be mapped.
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
