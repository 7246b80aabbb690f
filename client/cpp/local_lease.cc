#include "client/cpp/local_lease.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "logprobd/v1/local.pb.h"

namespace logprobd::client {
namespace {

// The server may page-lock a new region, which takes about 0.7 s per GiB.
constexpr timeval kReplyTimeout = {.tv_sec = 10, .tv_usec = 0};
constexpr size_t kPacketBytesMax = 65'536;

absl::Status SocketError(absl::string_view what) {
  return absl::UnavailableError(
      absl::StrCat("the control socket failed: ", what, ": ", strerror(errno)));
}

absl::Status ConnectError(const std::string& path, int error) {
  const std::string text = absl::StrCat(path, ": ", strerror(error));
  switch (error) {
    case ENOENT:
      return absl::FailedPreconditionError(
          absl::StrCat(text, ": in a container, mount the folder of the server's socket"));
    case EACCES:
      return absl::PermissionDeniedError(
          absl::StrCat(text, ": run the client as the server's user"));
    case ECONNREFUSED:
      return absl::UnavailableError(absl::StrCat(text, ": the server has ended"));
    default:
      return absl::UnavailableError(text);
  }
}

absl::StatusOr<int> ConnectSocket(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::FailedPreconditionError("the server has no control socket");
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0) return SocketError("socket");
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &kReplyTimeout, sizeof(kReplyTimeout));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &kReplyTimeout, sizeof(kReplyTimeout));
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    const int error = errno;
    close(fd);
    return ConnectError(path, error);
  }
  return fd;
}

/// Returns the file descriptor in a message's control data, or -1.
int PassedDescriptor(msghdr* message) {
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part), sizeof(fd));
      return fd;
    }
  }
  return -1;
}

}  // namespace

std::string BootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

SharedRegion::~SharedRegion() { munmap(bytes_.data(), bytes_.size()); }

absl::StatusOr<std::shared_ptr<LocalLease>> LocalLease::Connect(const LocalAccess& access,
                                                                const std::string& client_id) {
  if (access.boot_id.empty() || access.boot_id != BootId()) {
    return absl::FailedPreconditionError("the server runs on another host");
  }
  absl::StatusOr<int> fd = ConnectSocket(access.control_path);
  if (!fd.ok()) return fd.status();
  std::shared_ptr<LocalLease> lease(new LocalLease(*fd));
  v1::LocalRequest request;
  request.mutable_hello()->set_client_id(client_id);
  v1::LocalReply reply;
  int unused_fd = -1;
  if (absl::Status status = lease->Ask(request, &reply, &unused_fd); !status.ok()) return status;
  if (unused_fd >= 0) close(unused_fd);
  if (!reply.has_welcome()) {
    return absl::UnavailableError("the control socket answered without a welcome");
  }
  const v1::Welcome& welcome = reply.welcome();
  lease->grant_ = {.lease = welcome.lease(),
                   .shared_memory = welcome.shared_memory(),
                   .cuda_ipc = welcome.cuda_ipc(),
                   .region_bytes_max = static_cast<int64_t>(welcome.region_bytes_max()),
                   .lease_bytes_max = static_cast<int64_t>(welcome.lease_bytes_max()),
                   .regions_max = welcome.lease_regions_max()};
  return lease;
}

LocalLease::~LocalLease() { Close(); }

void LocalLease::Close() {
  const absl::MutexLock lock(&mutex_);
  if (socket_ >= 0) close(socket_);
  socket_ = -1;
}

bool LocalLease::HasEnded() {
  if (socket_ < 0) return true;
  // The server sends only replies, so a readable socket between requests means that the connection
  // has ended.
  pollfd events = {.fd = socket_, .events = POLLIN, .revents = 0};
  return poll(&events, 1, 0) != 0;
}

bool LocalLease::IsAlive() {
  const absl::MutexLock lock(&mutex_);
  return !HasEnded();
}

absl::StatusOr<std::shared_ptr<SharedRegion>> LocalLease::CreateRegion(int64_t bytes) {
  v1::LocalRequest request;
  request.mutable_create_region()->set_bytes(static_cast<uint64_t>(bytes));
  v1::LocalReply reply;
  int fd = -1;
  if (absl::Status status = Ask(request, &reply, &fd); !status.ok()) return status;
  if (fd < 0 || static_cast<int64_t>(reply.region().bytes()) < bytes) {
    if (fd >= 0) close(fd);
    return absl::UnavailableError("the control socket answered without a region");
  }
  const size_t size = reply.region().bytes();
  void* const memory =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  const int error = errno;
  close(fd);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a region of ", size, " bytes cannot be mapped: ", strerror(error)));
  }
  return std::make_shared<SharedRegion>(reply.region().id(),
                                        absl::MakeSpan(static_cast<std::byte*>(memory), size));
}

absl::Status LocalLease::CloseRegion(const std::string& id) {
  v1::LocalRequest request;
  request.mutable_close_region()->set_id(id);
  v1::LocalReply reply;
  int fd = -1;
  absl::Status status = Ask(request, &reply, &fd);
  if (fd >= 0) close(fd);
  return status;
}

absl::Status LocalLease::Ask(const v1::LocalRequest& request, v1::LocalReply* reply, int* fd) {
  const absl::MutexLock lock(&mutex_);
  const std::string sent = request.SerializeAsString();
  std::array<char, kPacketBytesMax> packet;
  iovec piece = {.iov_base = packet.data(), .iov_len = packet.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr message = {};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t received = -1;
  if (socket_ >= 0 && send(socket_, sent.data(), sent.size(), MSG_NOSIGNAL) >= 0) {
    do {
      received = recvmsg(socket_, &message, MSG_CMSG_CLOEXEC);
    } while (received < 0 && errno == EINTR);
  }
  // An empty packet is a reply without fields, unless the connection has ended.
  if (received < 0 || (received == 0 && HasEnded())) {
    absl::Status status = SocketError(received < 0 ? "no reply" : "closed by the server");
    // The socket is closed, because a late reply would be read as the next request's reply.
    if (socket_ >= 0) close(socket_);
    socket_ = -1;
    return status;
  }
  *fd = PassedDescriptor(&message);
  absl::Status status;
  if (!reply->ParseFromArray(packet.data(), static_cast<int>(received))) {
    status = absl::UnavailableError("the control socket's reply cannot be read");
  } else if (reply->status_code() != 0) {
    status =
        absl::Status(static_cast<absl::StatusCode>(reply->status_code()), reply->status_message());
  }
  if (!status.ok() && *fd >= 0) {
    close(*fd);
    *fd = -1;
  }
  return status;
}

}  // namespace logprobd::client
