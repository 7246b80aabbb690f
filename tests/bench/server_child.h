#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace logprobd::testing {

/// A server in a process of its own, so that its CPU time is not the client's: this very program,
/// run again as `program --serve KIND`, which calls ServeUntilClosed.
class ServerChild {
 public:
  /// Starts it and waits for its address. INTERNAL when it ends without one.
  static absl::StatusOr<std::unique_ptr<ServerChild>> Start(const std::string& kind);
  /// Closes its standard input and waits for its end.
  ~ServerChild();
  ServerChild(const ServerChild&) = delete;
  ServerChild& operator=(const ServerChild&) = delete;

  const std::string& address() const { return address_; }
  /// User and system time of all its threads so far.
  double CpuSeconds() const;

 private:
  ServerChild(pid_t pid, int input) : pid_(pid), input_(input) {}

  const pid_t pid_;
  const int input_;
  std::string address_;
};

/// In the child: tells the parent the address and returns when the parent is done.
void ServeUntilClosed(const std::string& address);

}  // namespace logprobd::testing
