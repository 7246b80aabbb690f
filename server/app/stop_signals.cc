#include "server/app/stop_signals.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <utility>

#include "server/base/errors.h"
#include "server/base/host.h"

namespace logprobd {
namespace {

sigset_t SignalSet() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGHUP);
  return set;
}

}  // namespace

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
    if (fds[1].revents != 0) {
      return;
    }
    signalfd_siginfo info{};
    if (read(signal_fd_, &info, sizeof(info)) != sizeof(info)) {
      continue;
    }
    if (info.ssi_signo == SIGHUP) {
      on_reload_();
    } else {
      on_stop_(static_cast<int>(info.ssi_signo), ++count);
    }
  }
}

}  // namespace logprobd
