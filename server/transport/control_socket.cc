#include "server/transport/control_socket.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "logprobd/v1/local.pb.h"
#include "server/base/clock.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/base/log.h"
#include "server/transport/audit.h"
#include "server/transport/call_info.h"
#include "server/transport/control_packet.h"
#include "server/transport/sockets.h"

namespace logprobd {
namespace {

/// Pause before the next attempt to accept when no file descriptor is left.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);
/// Part of the files for connections that leases may hold together. It leaves half of them to TCP
/// beside the Unix socket of gRPC.
constexpr int kFilesShare = 4;

absl::Time Now() { return Clock::Steady().Now(); }

}  // namespace

struct ControlSocket::Impl {
  Impl(Options socket_options, SharedRegions& shared_regions,
       std::unique_ptr<UnixListener> listening, FileDescriptor waking)
      : options(std::move(socket_options)),
        regions(shared_regions),
        listener(std::move(listening)),
        wake(std::move(waking)) {}

  /// A connected peer. Only the polling thread uses it.
  struct Connection {
    uint64_t number = 0;
    FileDescriptor socket;
    pid_t process = 0;
    absl::Time connected;
    std::optional<RandomId> lease = std::nullopt;  ///< Set by Hello.
    bool is_waiting = false;                       ///< True while its region is being created.
    bool is_over = false;                          ///< True when it must be closed.
  };

  /// A region to create for a connection, and the result.
  struct Creation {
    uint64_t connection = 0;
    RandomId lease = {};
    uint64_t bytes = 0;
    absl::StatusOr<SharedRegions::Created> created = absl::UnknownError("not created yet");
  };

  absl::Status Start();
  void Stop();

  // These functions run on the polling thread.
  void Run();
  void Accept();
  void Read(Connection& connection);
  void Take(Connection& connection, const std::string& packet);
  absl::StatusOr<v1::LocalReply> Handle(Connection& connection, const v1::LocalRequest& request);
  absl::StatusOr<v1::LocalReply> Welcome(Connection& connection, const v1::Hello& hello);
  void AnswerCreated();
  void Reply(Connection& connection, const v1::LocalReply& reply, int file_to_pass = -1);
  void EndConnections(absl::Time now);
  int PollMilliseconds(absl::Time now) const;
  bool IsAllowed(const SocketPeer& peer) const {
    return options.is_allowed ? options.is_allowed(peer.user) : peer.IsOwnOrRoot();
  }

  // This function runs on the thread that creates regions.
  void CreateRegions();

  void Wake() const {
    const uint64_t one = 1;
    (void)!write(wake.get(), &one, sizeof(one));
  }

  const Options options;
  SharedRegions& regions;
  const std::unique_ptr<UnixListener> listener;
  const FileDescriptor wake;
  std::vector<Connection> connections;
  uint64_t last_number = 0;
  LogLimiter refusals{Clock::Steady()};  ///< Limits the lines about processes of other users.
  absl::Time accept_again = absl::InfinitePast();

  absl::Mutex mutex;
  bool is_stopping ABSL_GUARDED_BY(mutex) = false;
  std::deque<Creation> to_create ABSL_GUARDED_BY(mutex);
  std::deque<Creation> created_regions ABSL_GUARDED_BY(mutex);
  std::thread run_thread;
  std::thread create_thread;
};

absl::Status ControlSocket::Impl::Start() {
  LOGPROBD_ASSIGN_OR_RETURN(create_thread, StartThread("local-make", [this] { CreateRegions(); }));
  LOGPROBD_ASSIGN_OR_RETURN(run_thread, StartThread("local", [this] { Run(); }));
  return absl::OkStatus();
}

void ControlSocket::Impl::Stop() {
  {
    const absl::MutexLock lock(&mutex);
    is_stopping = true;
  }
  Wake();
  for (std::thread* thread : {&run_thread, &create_thread}) {
    if (thread->joinable()) thread->join();
  }
  for (Connection& connection : connections) {
    if (connection.lease.has_value()) regions.CloseLease(*connection.lease);
  }
}

void ControlSocket::Impl::CreateRegions() {
  const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return is_stopping || !to_create.empty();
  };
  while (true) {
    Creation creation;
    {
      const absl::MutexLock lock(&mutex, absl::Condition(&has_work));
      if (is_stopping) return;
      creation = std::move(to_create.front());
      to_create.pop_front();
    }
    creation.created = regions.CreateRegion(creation.lease, creation.bytes);
    {
      const absl::MutexLock lock(&mutex);
      created_regions.push_back(std::move(creation));
    }
    Wake();
  }
}

void ControlSocket::Impl::Run() {
  std::vector<pollfd> polled;
  while (true) {
    const absl::Time now = Now();
    polled.clear();
    polled.push_back({wake.get(), POLLIN, 0});
    polled.push_back({now < accept_again ? -1 : listener->fd(), POLLIN, 0});
    for (const Connection& connection : connections) {
      // While a connection waits for its region, only the end of the connection is of interest.
      const auto events = static_cast<int16_t>(connection.is_waiting ? POLLRDHUP : POLLIN);
      polled.push_back({connection.socket.get(), events, 0});
    }
    (void)poll(polled.data(), polled.size(), PollMilliseconds(now));
    {
      const absl::MutexLock lock(&mutex);
      if (is_stopping) return;
    }
    if (polled[0].revents != 0) {
      uint64_t count = 0;
      (void)!read(wake.get(), &count, sizeof(count));
    }
    for (size_t i = 0; i < connections.size(); ++i) {
      if (polled[i + 2].revents == 0) continue;
      if (connections[i].is_waiting) {
        connections[i].is_over = true;
      } else {
        Read(connections[i]);
      }
    }
    AnswerCreated();
    EndConnections(Now());
    if (polled[1].revents != 0) Accept();
  }
}

/// Accepts one connection per poll, so that many new connections do not delay the others.
void ControlSocket::Impl::Accept() {
  Connection connection;
  connection.socket =
      FileDescriptor(accept4(listener->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  connection.connected = Now();
  if (!connection.socket.is_open()) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      LogWarning("control socket: a connection could not be accepted",
                 {{"error", std::strerror(errno)}});
      accept_again = connection.connected + kAcceptPause;
    }
    return;
  }
  const std::optional<SocketPeer> peer = PeerOf(connection.socket.get());
  if (!peer.has_value() || !IsAllowed(*peer)) {
    AuditRefusedConnection("--local", peer, refusals);
    Reply(connection, ReplyOf(absl::PermissionDeniedError(
                          "only processes of the server's own user and of root may connect")));
    return;
  }
  const int files = FilesForConnections(options.files_reserved);
  const int connections_max = std::clamp(files / kFilesShare, 1, options.connections_max);
  if (connections.size() >= static_cast<size_t>(connections_max)) {
    Reply(connection, ReplyOf(absl::ResourceExhaustedError(absl::StrCat(
                          "all ", connections_max, " leases are in use: try again later"))));
    return;
  }
  if (connection.socket.get() >= files) {
    Reply(connection, ReplyOf(absl::ResourceExhaustedError("few files are left: try again later")));
    return;
  }
  connection.number = ++last_number;
  connection.process = peer->process;
  connections.push_back(std::move(connection));
}

void ControlSocket::Impl::Read(Connection& connection) {
  std::string packet;
  switch (ReadPacket(connection.socket.get(), kPacketBytesMax, packet)) {
    case PacketRead::kNone:
      return;
    case PacketRead::kEnd:
      connection.is_over = true;
      return;
    case PacketRead::kTooLong:
      Reply(connection,
            ReplyOf(absl::InvalidArgumentError(absl::StrCat(
                "LocalRequest: the packet has more than ", kPacketBytesMax, " bytes"))));
      return;
    case PacketRead::kPacket:
      Take(connection, packet);
  }
}

void ControlSocket::Impl::Take(Connection& connection, const std::string& packet) {
  v1::LocalRequest request;
  absl::StatusOr<v1::LocalReply> reply =
      absl::InvalidArgumentError("LocalRequest: the packet is not a well-formed message");
  if (request.ParseFromString(packet)) reply = Handle(connection, request);
  if (!connection.is_waiting) Reply(connection, reply.ok() ? *reply : ReplyOf(reply.status()));
}

/// Returns the reply. If a region must be created, the reply is empty and connection.is_waiting is
/// true.
absl::StatusOr<v1::LocalReply> ControlSocket::Impl::Handle(Connection& connection,
                                                           const v1::LocalRequest& request) {
  if (request.has_hello()) return Welcome(connection, request.hello());
  if (request.kind_case() == v1::LocalRequest::KIND_NOT_SET) {
    return absl::InvalidArgumentError(
        "LocalRequest: empty, must have hello, create_region or close_region");
  }
  if (!connection.lease.has_value()) {
    return absl::FailedPreconditionError("there is no lease yet: send hello first");
  }
  if (request.has_close_region()) {
    RandomId id;
    LOGPROBD_RETURN_IF_ERROR(ReadId("close_region.id", request.close_region().id(), id));
    LOGPROBD_RETURN_IF_ERROR(regions.CloseRegion(*connection.lease, id));
    return ReplyOf(absl::OkStatus());
  }
  connection.is_waiting = true;
  Creation creation{.connection = connection.number,
                    .lease = *connection.lease,
                    .bytes = request.create_region().bytes()};
  const absl::MutexLock lock(&mutex);
  to_create.push_back(std::move(creation));
  return v1::LocalReply();
}

absl::StatusOr<v1::LocalReply> ControlSocket::Impl::Welcome(Connection& connection,
                                                            const v1::Hello& hello) {
  if (connection.lease.has_value()) {
    return absl::InvalidArgumentError("hello: sent twice, must be sent once per connection");
  }
  LOGPROBD_ASSIGN_OR_RETURN(connection.lease, regions.OpenLease());
  LogDebug("control socket: lease opened",
           {{"client", hello.client_id().empty() ? "" : internal::ClientId(hello.client_id(), "")},
            {"process", connection.process}});
  const SharedRegions::Options& limits = regions.options();
  v1::LocalReply reply;
  v1::Welcome& welcome = *reply.mutable_welcome();
  welcome.set_lease(BytesOf(*connection.lease));
  welcome.set_shared_memory(regions.is_on());
  welcome.set_cuda_ipc(options.cuda_ipc);
  welcome.set_region_bytes_max(static_cast<uint64_t>(limits.region_bytes_max));
  welcome.set_lease_bytes_max(static_cast<uint64_t>(limits.lease_bytes_max));
  welcome.set_lease_regions_max(static_cast<uint32_t>(limits.lease_regions_max));
  return reply;
}

void ControlSocket::Impl::AnswerCreated() {
  std::deque<Creation> answers;
  {
    const absl::MutexLock lock(&mutex);
    answers.swap(created_regions);
  }
  for (Creation& creation : answers) {
    const auto found = std::find_if(connections.begin(), connections.end(),
                                    [&creation](const Connection& connection) {
                                      return connection.number == creation.connection;
                                    });
    if (found == connections.end() || found->is_over) {
      continue;  // its lease is or will be closed, and the region with it
    }
    found->is_waiting = false;
    if (!creation.created.ok()) {
      Reply(*found, ReplyOf(creation.created.status()));
      continue;
    }
    v1::LocalReply reply;
    reply.mutable_region()->set_id(BytesOf(creation.created->id));
    reply.mutable_region()->set_bytes(static_cast<uint64_t>(creation.created->bytes));
    Reply(*found, reply, creation.created->file.get());
  }
}

void ControlSocket::Impl::Reply(Connection& connection, const v1::LocalReply& reply,
                                int file_to_pass) {
  if (!SendPacket(connection.socket.get(), reply.SerializeAsString(), file_to_pass)) {
    connection.is_over = true;
  }
}

/// Removes the connections that are over and those that have not sent Hello in time.
void ControlSocket::Impl::EndConnections(absl::Time now) {
  const auto is_over = [&](const Connection& connection) {
    return connection.is_over ||
           (!connection.lease.has_value() && connection.connected + options.hello_time_max <= now);
  };
  for (const Connection& connection : connections) {
    if (is_over(connection) && connection.lease.has_value()) regions.CloseLease(*connection.lease);
  }
  connections.erase(std::remove_if(connections.begin(), connections.end(), is_over),
                    connections.end());
}

int ControlSocket::Impl::PollMilliseconds(absl::Time now) const {
  absl::Time until = now < accept_again ? accept_again : absl::InfiniteFuture();
  for (const Connection& connection : connections) {
    if (!connection.lease.has_value()) {
      until = std::min(until, connection.connected + options.hello_time_max);
    }
  }
  if (until == absl::InfiniteFuture()) return -1;
  return static_cast<int>(
      std::clamp<int64_t>(absl::ToInt64Milliseconds(until - now) + 1, 0, 60'000));
}

absl::StatusOr<std::unique_ptr<ControlSocket>> ControlSocket::Create(const Options& options,
                                                                     SharedRegions& regions) {
  FileDescriptor wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.is_open()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("--local: cannot create an eventfd: ", std::strerror(errno)));
  }
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<UnixListener> listener,
                            UnixListener::Open("--local", options.path, SOCK_SEQPACKET));
  std::unique_ptr<ControlSocket> result(new ControlSocket(
      std::make_unique<Impl>(options, regions, std::move(listener), std::move(wake))));
  LOGPROBD_RETURN_IF_ERROR(result->impl_->Start());
  return result;
}

ControlSocket::ControlSocket(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

ControlSocket::~ControlSocket() { impl_->Stop(); }

}  // namespace logprobd
