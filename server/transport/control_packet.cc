#include "server/transport/control_packet.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/transport/grpc_status.h"

namespace logprobd {

PacketRead ReadPacket(int connection, int64_t bytes_max, std::string& packet) {
  packet.resize(static_cast<size_t>(bytes_max));
  ssize_t size = 0;
  do {
    size = recv(connection, packet.data(), packet.size(), MSG_DONTWAIT | MSG_TRUNC);
  } while (size < 0 && errno == EINTR);
  if (size < 0) {
    return errno == EAGAIN || errno == EWOULDBLOCK ? PacketRead::kNone : PacketRead::kEnd;
  }
  if (size > bytes_max) return PacketRead::kTooLong;
  packet.resize(static_cast<size_t>(size));
  if (size > 0) return PacketRead::kPacket;
  // An empty packet and the end of the connection look alike, except that the end persists.
  char next = 0;
  const ssize_t peeked = recv(connection, &next, 1, MSG_DONTWAIT | MSG_PEEK);
  return peeked == 0 || (peeked < 0 && errno != EAGAIN && errno != EWOULDBLOCK)
             ? PacketRead::kEnd
             : PacketRead::kPacket;
}

bool SendPacket(int connection, absl::string_view packet, int file) {
  iovec data = {const_cast<char*>(packet.data()), packet.size()};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  if (file >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &file, sizeof(int));
  }
  ssize_t sent = 0;
  do {
    sent = sendmsg(connection, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(packet.size());
}

v1::LocalReply ReplyOf(const absl::Status& status) {
  v1::LocalReply reply;
  reply.set_status_code(static_cast<int32_t>(status.code()));
  // A reply without a message would be an empty packet, which looks like the end of the connection.
  reply.set_status_message(status.ok() ? "OK" : ClientMessage(status, "this lease"));
  return reply;
}

std::string BytesOf(const RandomId& id) { return {id.begin(), id.end()}; }

absl::Status ReadId(absl::string_view field, absl::string_view bytes, RandomId& id) {
  if (bytes.size() != id.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": ", bytes.size(), " bytes, must be exactly ", id.size()));
  }
  std::memcpy(id.data(), bytes.data(), id.size());
  return absl::OkStatus();
}

}  // namespace logprobd
