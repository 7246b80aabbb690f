#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "logprobd/v1/local.pb.h"
#include "server/base/score_request.h"

namespace logprobd {

/// The result of reading a packet from a SOCK_SEQPACKET connection.
enum class PacketRead {
  kNone,     ///< No packet has arrived yet.
  kEnd,      ///< The peer closed the connection, or it is broken.
  kTooLong,  ///< The packet was too long and was dropped.
  kPacket    ///< A packet was read.
};

/// Reads a packet of at most `bytes_max` bytes into `packet` without waiting. The system closes
/// file descriptors that arrive with it, because this function receives none.
PacketRead ReadPacket(int connection, int64_t bytes_max, std::string& packet);

/// Sends a packet without waiting, with file descriptor `file` unless it is -1. Returns false when
/// the peer has gone or has not read the earlier packets.
bool SendPacket(int connection, absl::string_view packet, int file);

/// Returns a reply that has only `status`, with its ClientMessage. The serialised reply is never
/// empty.
v1::LocalReply ReplyOf(const absl::Status& status);

std::string BytesOf(const RandomId& id);

/// Copies `bytes` to `id`. Returns INVALID_ARGUMENT, which names `field`, if their sizes differ.
absl::Status ReadId(absl::string_view field, absl::string_view bytes, RandomId& id);

}  // namespace logprobd
