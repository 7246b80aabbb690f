#include "tests/support/fake_control_socket.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"

namespace logprobd::testing {
namespace {

constexpr int64_t kPageBytes = 4096;

std::string BootIdOfThisHost() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

void Send(int socket, const std::string& packet, int fd) {
  iovec piece = {.iov_base = const_cast<char*>(packet.data()), .iov_len = packet.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr message = {};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(part), &fd, sizeof(fd));
  }
  // An error is ignored, since the next read detects a client that has disconnected.
  static_cast<void>(sendmsg(socket, &message, MSG_NOSIGNAL));
}

v1::LocalReply Refusal(grpc::StatusCode code, const std::string& message) {
  v1::LocalReply reply;
  reply.set_status_code(code);
  reply.set_status_message(message);
  return reply;
}

}  // namespace

FakeControlSocket::FakeControlSocket(Options options) : options_(std::move(options)) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path_.data(), path_.size());
  listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  static_cast<void>(bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)));
  static_cast<void>(listen(listener_, 16));
  accepting_ = std::thread([this] { Accept(); });
}

FakeControlSocket::~FakeControlSocket() {
  shutdown(listener_, SHUT_RDWR);  // wakes accept, unlike close
  accepting_.join();
  DropLeases();
  for (std::thread& server : servers_) server.join();
  close(listener_);
}

v1::LocalAccess FakeControlSocket::access() const {
  v1::LocalAccess access;
  access.set_boot_id(BootIdOfThisHost());
  access.set_control_path(path_);
  access.set_shared_memory(options_.shared_memory);
  access.set_cuda_ipc(!options_.device_memory.empty());
  return access;
}

grpc::Status FakeControlSocket::Fill(v1::ScoreRequest* request) const {
  absl::MutexLock lock(&mutex_);
  const bool has_slice = request->has_shared_memory() || request->has_cuda_ipc();
  if (has_slice && !refusal_.ok()) return refusal_;
  if (request->has_shared_memory()) {
    const v1::SharedMemorySlice& slice = request->shared_memory();
    for (const Lease& lease : leases_) {
      const auto region = lease.regions.find(slice.region());
      if (region == lease.regions.end()) continue;
      if (slice.offset() % 64 != 0 || slice.offset() + slice.bytes() > region->second.size()) {
        return {grpc::StatusCode::INVALID_ARGUMENT, "shared_memory: beyond its region"};
      }
      request->set_hidden(region->second.data() + slice.offset(), slice.bytes());
      return grpc::Status::OK;
    }
    return {grpc::StatusCode::NOT_FOUND, "shared_memory: no such region"};
  }
  if (request->has_cuda_ipc()) {
    const v1::CudaIpcSlice& slice = request->cuda_ipc();
    bool is_known = false;
    for (const Lease& lease : leases_) is_known = is_known || lease.id == slice.lease();
    if (!is_known) return {grpc::StatusCode::NOT_FOUND, "cuda_ipc: no such lease"};
    if (slice.offset() % 16 != 0 ||
        slice.offset() + slice.bytes() > options_.device_memory.size()) {
      return {grpc::StatusCode::INVALID_ARGUMENT, "cuda_ipc: beyond the allocation"};
    }
    request->set_hidden(options_.device_memory.substr(slice.offset(), slice.bytes()));
  }
  return grpc::Status::OK;
}

void FakeControlSocket::DropLeases() {
  absl::MutexLock lock(&mutex_);
  for (Lease& lease : leases_) {
    lease.regions.clear();
    shutdown(lease.socket, SHUT_RDWR);
  }
}

void FakeControlSocket::LoseRegions() {
  absl::MutexLock lock(&mutex_);
  for (Lease& lease : leases_) lease.regions.clear();
}

void FakeControlSocket::RefuseSlices(grpc::Status status) {
  absl::MutexLock lock(&mutex_);
  refusal_ = std::move(status);
}

std::vector<std::string> FakeControlSocket::clients() const {
  absl::MutexLock lock(&mutex_);
  std::vector<std::string> names;
  for (const Lease& lease : leases_) {
    if (lease.is_greeted) names.push_back(lease.client_id);
  }
  return names;
}

int64_t FakeControlSocket::num_regions() const {
  absl::MutexLock lock(&mutex_);
  size_t count = 0;
  for (const Lease& lease : leases_) count += lease.regions.size();
  return static_cast<int64_t>(count);
}

int64_t FakeControlSocket::region_bytes() const {
  absl::MutexLock lock(&mutex_);
  size_t bytes = 0;
  for (const Lease& lease : leases_) {
    for (const auto& [id, memory] : lease.regions) bytes += memory.size();
  }
  return static_cast<int64_t>(bytes);
}

void FakeControlSocket::WaitForNoLease() const {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](const std::list<Lease>* leases) { return leases->empty(); }, &leases_));
}

void FakeControlSocket::Accept() {
  while (true) {
    const int connection = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (connection < 0) return;
    absl::MutexLock lock(&mutex_);
    leases_.push_back({.socket = connection, .id = absl::StrCat("lease-", next_id_++)});
    servers_.emplace_back([this, lease = &leases_.back()] { Serve(lease); });
  }
}

void FakeControlSocket::Serve(Lease* lease) {
  std::array<char, 65'536> packet;
  while (true) {
    const ssize_t received = recv(lease->socket, packet.data(), packet.size(), 0);
    if (received <= 0) break;
    v1::LocalRequest request;
    (void)request.ParseFromArray(packet.data(), static_cast<int>(received));
    int fd = -1;
    const v1::LocalReply reply = Answer(request, lease, &fd);
    Send(lease->socket, options_.nonsense.empty() ? reply.SerializeAsString() : options_.nonsense,
         fd);
    if (fd >= 0) close(fd);
  }
  absl::MutexLock lock(&mutex_);
  close(lease->socket);
  Forget(lease);
}

void FakeControlSocket::Forget(Lease* lease) {
  leases_.remove_if([lease](const Lease& other) { return &other == lease; });
}

v1::LocalReply FakeControlSocket::Answer(const v1::LocalRequest& request, Lease* lease, int* fd) {
  absl::MutexLock lock(&mutex_);
  v1::LocalReply reply;
  if (request.has_hello()) {
    lease->is_greeted = true;
    lease->client_id = request.hello().client_id();
    v1::Welcome& welcome = *reply.mutable_welcome();
    welcome.set_lease(lease->id);
    welcome.set_shared_memory(options_.shared_memory);
    welcome.set_cuda_ipc(!options_.device_memory.empty());
    welcome.set_region_bytes_max(static_cast<uint64_t>(options_.region_bytes_max));
    welcome.set_lease_bytes_max(static_cast<uint64_t>(options_.lease_bytes_max));
    welcome.set_lease_regions_max(options_.lease_regions_max);
    return reply;
  }
  if (!lease->is_greeted) return Refusal(grpc::StatusCode::FAILED_PRECONDITION, "send Hello first");
  if (request.has_close_region()) {
    const bool is_known = lease->regions.erase(request.close_region().id()) == 1;
    return is_known ? reply : Refusal(grpc::StatusCode::NOT_FOUND, "no such region of this lease");
  }
  if (options_.refuses_with_descriptor) {
    *fd = memfd_create("logprobd-refused", MFD_CLOEXEC);
    return Refusal(grpc::StatusCode::RESOURCE_EXHAUSTED, "refused");
  }
  const auto wanted = static_cast<int64_t>(request.create_region().bytes());
  const int64_t bytes = (wanted + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (bytes <= 0 || bytes > options_.region_bytes_max) {
    return Refusal(grpc::StatusCode::RESOURCE_EXHAUSTED, "above the limits");
  }
  *fd = memfd_create("logprobd-fake", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (ftruncate(*fd, bytes) != 0) {
    return Refusal(grpc::StatusCode::RESOURCE_EXHAUSTED, "no memory for the region");
  }
  static_cast<void>(fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW));
  const auto size = static_cast<size_t>(bytes);
  // The memory is never unmapped, because a request may still read it and tests are short.
  void* const memory = mmap(nullptr, size, PROT_READ, MAP_SHARED, *fd, 0);
  const std::string id = absl::StrCat("region-", next_id_++);
  lease->regions[id] = absl::MakeSpan(static_cast<char*>(memory), size);
  reply.mutable_region()->set_id(id);
  reply.mutable_region()->set_bytes(size);
  return reply;
}

}  // namespace logprobd::testing
