#include "server/app/process_limits.h"

#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

namespace logprobd {
namespace {

/// More than any sensible number of connections; some systems set the hard limit to a billion.
constexpr rlim_t kOpenFilesWanted = 65'536;

absl::Status CheckOpenFiles() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return absl::InternalError(absl::StrCat("getrlimit: ", std::strerror(errno)));
  }
  if (limit.rlim_cur < kOpenFilesWanted && limit.rlim_cur < limit.rlim_max) {
    rlimit raised = limit;
    raised.rlim_cur = std::min(limit.rlim_max, kOpenFilesWanted);
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) {
      limit = raised;
    }
  }
  if (limit.rlim_cur < kOpenFilesMin) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the limit of open files is ", limit.rlim_cur, ", at least ", kOpenFilesMin,
                     " are needed: raise it (ulimit -n, or LimitNOFILE in systemd)"));
  }
  return absl::OkStatus();
}

void* WaitFor(void* release) {
  static_cast<absl::Notification*>(release)->WaitForNotification();
  return nullptr;
}

/// By trying: limits on threads stand in several places (ulimit, systemd, control groups).
absl::Status CheckThreads() {
  absl::Notification release;
  std::vector<pthread_t> threads;
  int error = 0;
  while (error == 0 && threads.size() < kThreadsMin) {
    pthread_t thread{};
    error = pthread_create(&thread, nullptr, WaitFor, &release);
    if (error == 0) {
      threads.push_back(thread);
    }
  }
  release.Notify();
  for (const pthread_t thread : threads) {
    pthread_join(thread, nullptr);
  }
  if (error != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("only ", threads.size(), " threads can be started (", std::strerror(error),
                     "), at least ", kThreadsMin,
                     " are needed: raise the limit (ulimit -u, TasksMax in systemd, or the "
                     "container's pids limit) or the memory limit (ulimit -v)"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PrepareProcessLimits() {
  absl::Status status = CheckOpenFiles();
  return status.ok() ? CheckThreads() : status;
}

}  // namespace logprobd
