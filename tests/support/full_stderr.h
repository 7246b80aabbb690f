#pragma once

#include <fcntl.h>
#include <unistd.h>

namespace logprobd::testing {

/// While it exists, standard error is a full disk: every write fails.
class FullStderr {
 public:
  FullStderr() : before_(dup(STDERR_FILENO)) {
    const int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    dup2(full, STDERR_FILENO);
    close(full);
  }
  ~FullStderr() {
    dup2(before_, STDERR_FILENO);
    close(before_);
  }
  FullStderr(const FullStderr&) = delete;
  FullStderr& operator=(const FullStderr&) = delete;

 private:
  const int before_;
};

}  // namespace logprobd::testing
