#include "tests/support/control_client.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "server/base/errors.h"
#include "server/transport/control_packet.h"

namespace logprobd::testing {

ControlClient::ControlClient(const std::string& path)
    : socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  LOGPROBD_CHECK(path.size() < sizeof(address.sun_path), path);
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  LOGPROBD_CHECK(
      connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0,
      path, " ", std::strerror(errno));
}

bool ControlClient::Send(absl::string_view packet, int file) {
  return SendPacket(socket_.get(), packet, file);
}

bool ControlClient::SendWaiting(absl::string_view packet) {
  return send(socket_.get(), packet.data(), packet.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(packet.size());
}

std::optional<ControlReply> ControlClient::Receive() {
  std::array<char, 8'192> packet = {};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  iovec data = {packet.data(), packet.size()};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t size = 0;
  do {
    size = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  } while (size < 0 && errno == EINTR);
  if (size <= 0) {
    return std::nullopt;
  }
  ControlReply reply;
  LOGPROBD_CHECK(reply.message.ParseFromArray(packet.data(), static_cast<int>(size)));
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header != nullptr) {
    int file = -1;
    std::memcpy(&file, CMSG_DATA(header), sizeof(file));
    reply.file = FileDescriptor(file);
  }
  return reply;
}

ControlReply ControlClient::Call(const v1::LocalRequest& request) {
  LOGPROBD_CHECK(Send(request));
  std::optional<ControlReply> reply = Receive();
  LOGPROBD_CHECK(reply.has_value(), "the server has closed the connection");
  return *std::move(reply);
}

v1::LocalReply ControlClient::Hello(const std::string& client_id) {
  v1::LocalRequest request;
  request.mutable_hello()->set_client_id(client_id);
  return Call(request).message;
}

ControlReply ControlClient::CreateRegion(uint64_t bytes) {
  v1::LocalRequest request;
  request.mutable_create_region()->set_bytes(bytes);
  return Call(request);
}

v1::LocalReply ControlClient::CloseRegion(const std::string& id) {
  v1::LocalRequest request;
  request.mutable_close_region()->set_id(id);
  return Call(request).message;
}

MappedRegion::MappedRegion(const ControlReply& reply) : id_(reply.message.region().id()) {
  const auto size = static_cast<size_t>(reply.message.region().bytes());
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, reply.file.get(), 0);
  LOGPROBD_CHECK(mapped != MAP_FAILED, std::strerror(errno));
  bytes_ = absl::MakeSpan(static_cast<std::byte*>(mapped), size);
}

MappedRegion::~MappedRegion() { munmap(bytes_.data(), bytes_.size()); }

}  // namespace logprobd::testing
