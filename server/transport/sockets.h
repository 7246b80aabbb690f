#pragma once

#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/file_descriptor.h"

namespace logprobd {

/// Checks that a server may create a Unix socket of `type` at `path`, without blocking. Returns
/// INVALID_ARGUMENT if `path` cannot be a Unix socket, and UNAVAILABLE if a server listens there or
/// if the function cannot find out. Errors name `flag`. A leftover socket on which no server
/// listens may be replaced, if the caller holds the path's SocketPathLock.
absl::Status CheckSocketPath(absl::string_view flag, const std::string& path,
                             int type = SOCK_STREAM);

/// Identifies a file, so that it is not confused with a later one of the same path.
struct FileId {
  dev_t device = 0;
  ino_t inode = 0;
  bool operator==(const FileId& other) const {
    return device == other.device && inode == other.inode;
  }
};

/// The right to create Unix sockets at a path, which only one process has at a time. Without it,
/// two servers that start at the same time would both find a leftover socket, and the second one
/// would remove the socket of the first.
class SocketPathLock {
 public:
  /// Locks the file "PATH.lock", without blocking. Returns UNAVAILABLE that names `flag` if another
  /// server holds the lock or if the file cannot be created.
  static absl::StatusOr<std::unique_ptr<SocketPathLock>> Take(absl::string_view flag,
                                                              const std::string& path);

  /// Removes the file.
  ~SocketPathLock();

 private:
  SocketPathLock(std::string file, FileDescriptor lock);

  const std::string file_;
  const FileDescriptor lock_;
};

/// A Unix socket on which the process listens, with mode 0600. The destructor removes its file,
/// unless another one has replaced it.
class UnixListener {
 public:
  /// Replaces a leftover socket at `path`; the caller holds the path's SocketPathLock. `type` is
  /// SOCK_STREAM or SOCK_SEQPACKET. Returns the errors of CheckSocketPath, and UNAVAILABLE that
  /// names `flag` if the system refuses.
  static absl::StatusOr<std::unique_ptr<UnixListener>> Open(absl::string_view flag,
                                                            const std::string& path, int type);
  ~UnixListener();

  /// Returns the listening, non-blocking socket.
  int fd() const { return socket_.get(); }

 private:
  UnixListener(std::string path, FileDescriptor socket);

  const std::string path_;
  const FileDescriptor socket_;
  const FileId file_;  ///< Of the socket's file, which may be replaced by another of the same path.
};

/// Returns the number of files that the process may open, less `reserved`, which are for other uses
/// than connections. The kernel gives the lowest free number to a new descriptor, so a connection
/// whose number is not below it takes one of the last.
int FilesForConnections(int reserved);

/// The process at the other end of a connected Unix socket.
struct SocketPeer {
  uid_t user;
  pid_t process;

  bool IsOwnOrRoot() const { return user == geteuid() || user == 0; }
};

/// Returns nullopt if the system does not know the peer.
std::optional<SocketPeer> PeerOf(int socket);

}  // namespace logprobd
