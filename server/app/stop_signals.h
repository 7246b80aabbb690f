#pragma once

#include <functional>
#include <thread>

namespace logprobd {

/// Turns SIGTERM and SIGINT into calls on a thread of its own, where anything may be done.
///
/// Create it in main before any other thread: the signals are blocked in the calling thread and in
/// all threads that it starts from then on. The destructor ends the thread; the signals stay
/// blocked.
class StopSignals {
 public:
  /// `on_signal` gets the signal and how many have come, this one included.
  explicit StopSignals(std::function<void(int signal, int count)> on_signal);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

 private:
  void Watch();

  const std::function<void(int, int)> on_signal_;
  int signal_fd_;
  int end_fd_;
  std::thread thread_;
};

}  // namespace logprobd
