#include "server/transport/sockets.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

constexpr mode_t kOwnerOnly = S_IRUSR | S_IWUSR;
/// Maximum number of attempts to lock a file that its former owner removes at the same time.
constexpr int kLockAttemptsMax = 100;

/// Returns an address with a path that CheckSocketPath has accepted.
sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

/// Returns the id of the file at `path`, or that of no file.
FileId IdOf(const std::string& path) {
  struct stat info = {};
  return lstat(path.c_str(), &info) == 0 ? FileId{info.st_dev, info.st_ino} : FileId();
}

FileId IdOf(const FileDescriptor& file) {
  struct stat info = {};
  return fstat(file.get(), &info) == 0 ? FileId{info.st_dev, info.st_ino} : FileId();
}

}  // namespace

absl::Status CheckSocketPath(absl::string_view flag, const std::string& path, int type) {
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(flag, ": the path has ", path.size(),
                                                   " bytes, must have fewer than ",
                                                   sizeof(sockaddr_un::sun_path)));
  }
  struct stat file = {};
  if (lstat(path.c_str(), &file) != 0) return absl::OkStatus();
  if (!S_ISSOCK(file.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(
        flag, ": ", path, " exists and is not a socket; remove it or choose another path"));
  }
  const sockaddr_un address = AddressOf(path);
  // The probe is non-blocking, because the queue of a server that hangs may be full.
  const FileDescriptor probe(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ||
      errno == EPROTOTYPE || errno == EAGAIN) {  // of another type, or its queue is full
    return absl::UnavailableError(absl::StrCat(flag, ": another server is listening on ", path));
  }
  if (errno == ECONNREFUSED || errno == ENOENT) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(flag, ": cannot find out whether a server listens on ",
                                             path, ": ", std::strerror(errno)));
}

SocketPathLock::SocketPathLock(std::string file, FileDescriptor lock)
    : file_(std::move(file)), lock_(std::move(lock)) {}

SocketPathLock::~SocketPathLock() { (void)unlink(file_.c_str()); }

absl::StatusOr<std::unique_ptr<SocketPathLock>> SocketPathLock::Take(absl::string_view flag,
                                                                     const std::string& path) {
  const std::string file = absl::StrCat(path, ".lock");
  for (int i = 0; i < kLockAttemptsMax; ++i) {
    FileDescriptor lock(open(file.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, kOwnerOnly));
    if (!lock.is_open()) {
      return absl::UnavailableError(
          absl::StrCat(flag, ": cannot open ", file, ": ", std::strerror(errno)));
    }
    if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
      return absl::UnavailableError(
          errno == EWOULDBLOCK
              ? absl::StrCat(flag, ": another server is listening on ", path)
              : absl::StrCat(flag, ": cannot lock ", file, ": ", std::strerror(errno)));
    }
    // A server that has just ended may have removed the file between open and flock.
    if (IdOf(lock) == IdOf(file)) {
      return std::unique_ptr<SocketPathLock>(new SocketPathLock(file, std::move(lock)));
    }
  }
  return absl::UnavailableError(absl::StrCat(flag, ": ", file, " is replaced again and again"));
}

UnixListener::UnixListener(std::string path, FileDescriptor socket)
    : path_(std::move(path)), socket_(std::move(socket)), file_(IdOf(path_)) {}

UnixListener::~UnixListener() {
  if (IdOf(path_) == file_) (void)unlink(path_.c_str());
}

absl::StatusOr<std::unique_ptr<UnixListener>> UnixListener::Open(absl::string_view flag,
                                                                 const std::string& path,
                                                                 int type) {
  LOGPROBD_RETURN_IF_ERROR(CheckSocketPath(flag, path, type));
  FileDescriptor listener(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const sockaddr_un address = AddressOf(path);
  (void)unlink(path.c_str());  // removes a leftover; CheckSocketPath found no server
  // fchmod sets the mode before bind creates the file, so the file has this mode from the start.
  if (!listener.is_open() || fchmod(listener.get(), kOwnerOnly) != 0 ||
      bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0) {
    return absl::UnavailableError(
        absl::StrCat(flag, ": cannot listen on ", path, ": ", std::strerror(errno)));
  }
  return std::unique_ptr<UnixListener>(new UnixListener(path, std::move(listener)));
}

int FilesForConnections(int reserved) {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  return (limit.rlim_cur > INT32_MAX ? INT32_MAX : static_cast<int>(limit.rlim_cur)) - reserved;
}

std::optional<SocketPeer> PeerOf(int socket) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::nullopt;
  return SocketPeer{.user = peer.uid, .process = peer.pid};
}

}  // namespace logprobd
