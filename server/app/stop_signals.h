#pragma once

#include <functional>
#include <thread>

namespace logprobd {

/// Turns SIGTERM, SIGINT and SIGHUP into calls on a thread of its own, where anything may be done.
///
/// Create it in main before any other thread: the signals are blocked in the calling thread and in
/// all threads that it starts from then on. The destructor ends the thread; the signals stay
/// blocked.
class StopSignals {
 public:
  /// `on_stop` gets SIGTERM or SIGINT and how many of them have come, this one included;
  /// `on_reload` is called for SIGHUP, once for several that come together.
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
