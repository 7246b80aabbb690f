#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// Owns a file descriptor.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// Checks that a server may create a Unix socket of `type` at `path`, without blocking. Returns
/// INVALID_ARGUMENT if `path` cannot be a Unix socket, and UNAVAILABLE if a server listens there or
/// if the function cannot find out. Errors name `flag`. A leftover socket on which no server
/// listens may be replaced.
absl::Status CheckSocketPath(absl::string_view flag, const std::string& path,
                             int type = SOCK_STREAM);

}  // namespace logprobd
