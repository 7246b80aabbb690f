#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

namespace logprobd::testing {

/// Returns the number of file descriptors below `end` that are open.
inline int CountOpenFiles(int end = 1'024) {
  int count = 0;
  for (int fd = 0; fd < end; ++fd) count += fcntl(fd, F_GETFD) == -1 ? 0 : 1;
  return count;
}

/// Lowers the limit on open files for a scope, so that the process can open only `left` more.
class FewFiles {
 public:
  explicit FewFiles(int left) {
    getrlimit(RLIMIT_NOFILE, &before_);
    const int next = dup(0);
    close(next);
    rlimit few = before_;
    few.rlim_cur = static_cast<rlim_t>(next + left);
    setrlimit(RLIMIT_NOFILE, &few);
  }
  ~FewFiles() { setrlimit(RLIMIT_NOFILE, &before_); }
  FewFiles(const FewFiles&) = delete;
  FewFiles& operator=(const FewFiles&) = delete;

 private:
  rlimit before_ = {};
};

}  // namespace logprobd::testing
