#pragma once

#include <functional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace logprobd {

/// Version and commit of this build.
struct BuildInfo {
  std::string version;
  std::string commit;
};
BuildInfo Build();

/// Smallest limit of open files with which the server starts. The server itself opens about 40
/// files, and each connection opens one.
inline constexpr int kOpenFilesMin = 256;
/// Number of threads that must be startable in addition to the running ones, for gRPC, the engines
/// and the server itself.
inline constexpr int kThreadsMin = 64;

/// Opens /dev/null as each standard stream that is closed. Otherwise the next socket would have its
/// number, and log lines would go there.
void OpenClosedStandardStreams();

/// Raises the soft limit of open files as far as the hard limit allows, then checks the limits of
/// files and threads. Returns RESOURCE_EXHAUSTED that names the limit, its value and the required
/// minimum.
absl::Status PrepareProcessLimits();

/// Ends the process with kExitHung after `delay`, rounded up to seconds, or at once if it is zero.
/// The kernel's timer does it (SIGALRM), so that nothing in the process can prevent it. Neither
/// destructors nor functions of atexit run.
void ExitHungAfter(absl::Duration delay);

/// Turns SIGTERM, SIGINT and SIGHUP into calls on a separate thread, where any function may be
/// called.
///
/// Must be created in main before any other thread that takes signals is started: it blocks the
/// signals in the calling thread and in all threads that this thread starts later. The destructor
/// ends the separate thread but does not unblock the signals. Each signal leaves a line `audit`
/// that names its sender.
class StopSignals {
 public:
  /// `on_stop` receives the signal (SIGTERM or SIGINT) and the number of these signals that have
  /// arrived, including this one. `on_reload` is called for SIGHUP, and only once if several arrive
  /// together.
  StopSignals(std::function<void(int signal, int count)> on_stop, std::function<void()> on_reload);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

 private:
  void Watch();

  const std::function<void(int, int)> on_stop_;
  const std::function<void()> on_reload_;
  int signal_fd_;
  int end_fd_;
  std::thread thread_;
};

}  // namespace logprobd
