#include "server/app/run/process.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/app/run/run.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/base/log.h"

namespace logprobd {
namespace {

/// Target for the soft limit of open files, which is more than any realistic server needs. The hard
/// limit is not the target because some systems set it to a billion.
constexpr rlim_t kOpenFilesTarget = 65'536;

absl::Status CheckOpenFiles() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return absl::InternalError(absl::StrCat("getrlimit: ", std::strerror(errno)));
  }
  if (limit.rlim_cur < kOpenFilesTarget && limit.rlim_cur < limit.rlim_max) {
    rlimit raised = limit;
    raised.rlim_cur = std::min(limit.rlim_max, kOpenFilesTarget);
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  if (limit.rlim_cur < kOpenFilesMin) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the limit of open files is ", limit.rlim_cur, ", but at least ", kOpenFilesMin,
        " are needed: raise it (ulimit -n, or LimitNOFILE in systemd)"));
  }
  return absl::OkStatus();
}

void* AwaitRelease(void* release) {
  static_cast<absl::Notification*>(release)->WaitForNotification();
  return nullptr;
}

/// Checks whether kThreadsMin threads can run by starting them, because limits are set in several
/// places (ulimit, systemd, control groups).
absl::Status CheckThreads() {
  absl::Notification release;
  std::vector<pthread_t> threads;
  int error = 0;
  while (error == 0 && threads.size() < kThreadsMin) {
    pthread_t thread{};
    error = pthread_create(&thread, nullptr, AwaitRelease, &release);
    if (error == 0) threads.push_back(thread);
  }
  release.Notify();
  for (const pthread_t thread : threads) pthread_join(thread, nullptr);
  if (error != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("only ", threads.size(), " threads can be started (", std::strerror(error),
                     "), but at least ", kThreadsMin,
                     " are needed: raise the limit (ulimit -u, TasksMax in systemd, or the "
                     "container's pids limit) or the memory limit (ulimit -v)"));
  }
  return absl::OkStatus();
}

absl::string_view NameOf(uint32_t signal) {
  return signal == SIGHUP ? "SIGHUP" : signal == SIGINT ? "SIGINT" : "SIGTERM";
}

sigset_t SignalSet() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGHUP);
  return set;
}

}  // namespace

BuildInfo Build() { return {LOGPROBD_VERSION, LOGPROBD_COMMIT}; }

void OpenClosedStandardStreams() {
  int file = 0;  // the lowest number that is free
  do {
    file = open("/dev/null", O_RDWR | O_CLOEXEC);
  } while (file >= 0 && file <= STDERR_FILENO);
  if (file >= 0) close(file);
}

absl::Status PrepareProcessLimits() {
  absl::Status status = CheckOpenFiles();
  return status.ok() ? CheckThreads() : status;
}

void ExitHungAfter(absl::Duration delay) {
  if (delay <= absl::ZeroDuration()) {
    FlushLog();
    _exit(kExitHung);
  }
  // The default action would not do: the first process of a container ignores it.
  std::signal(SIGALRM, [](int) { _exit(kExitHung); });
  alarm(static_cast<unsigned>(absl::ToInt64Seconds(absl::Ceil(delay, absl::Seconds(1)))));
}

StopSignals::StopSignals(std::function<void(int, int)> on_stop, std::function<void()> on_reload)
    : on_stop_(std::move(on_stop)), on_reload_(std::move(on_reload)) {
  const sigset_t set = SignalSet();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal_fd_ = signalfd(-1, &set, SFD_CLOEXEC);
  end_fd_ = eventfd(0, EFD_CLOEXEC);
  LOGPROBD_CHECK(signal_fd_ >= 0 && end_fd_ >= 0, "signalfd and eventfd");
  absl::StatusOr<std::thread> thread = StartThread("signals", [this] { Watch(); });
  LOGPROBD_CHECK(thread.ok(), thread.status().message());
  thread_ = *std::move(thread);
}

StopSignals::~StopSignals() {
  const uint64_t one = 1;
  LOGPROBD_CHECK(write(end_fd_, &one, sizeof(one)) == sizeof(one));
  thread_.join();
  close(signal_fd_);
  close(end_fd_);
}

void StopSignals::Watch() {
  pollfd fds[] = {{signal_fd_, POLLIN, 0}, {end_fd_, POLLIN, 0}};
  int count = 0;
  while (true) {
    if (poll(fds, 2, -1) < 0) {
      continue;  // EINTR
    }
    if (fds[1].revents != 0) return;
    signalfd_siginfo info{};
    if (read(signal_fd_, &info, sizeof(info)) != sizeof(info)) continue;
    const LogField sender[] = {
        {"signal", NameOf(info.ssi_signo)}, {"user", info.ssi_uid}, {"process", info.ssi_pid}};
    LogAudit(LogLevel::kInfo, sender);
    if (info.ssi_signo == SIGHUP) {
      on_reload_();
    } else {
      on_stop_(static_cast<int>(info.ssi_signo), ++count);
    }
  }
}

}  // namespace logprobd
