#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "logprobd/v1/local.pb.h"
#include "server/base/score_request.h"

namespace logprobd {

/// What came of reading a packet from a connection of type SOCK_SEQPACKET.
enum class PacketRead {
  kNone,     ///< None has come yet.
  kEnd,      ///< The peer has closed, or the connection is broken.
  kTooLong,  ///< Longer than asked for: dropped.
  kPacket
};

/// Reads a packet of at most `bytes_max` bytes without waiting. File descriptors that came with it
/// are closed by the system: we take none.
PacketRead ReadPacket(int connection, int64_t bytes_max, std::string& packet);

/// Sends a packet without waiting, with file descriptor `file` unless it is -1. False when the peer
/// is gone or has not taken what was sent before.
bool SendPacket(int connection, absl::string_view packet, int file);

/// A reply without anything but `status`, its message cut and cleaned as for gRPC. Never empty when
/// it is serialised.
v1::LocalReply ReplyOf(const absl::Status& status);

std::string BytesOf(const RandomId& id);

/// INVALID_ARGUMENT, naming `field`, when `bytes` are not an id's.
absl::Status ReadId(absl::string_view field, absl::string_view bytes, RandomId& id);

}  // namespace logprobd
