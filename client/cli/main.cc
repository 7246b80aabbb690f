#include <unistd.h>

#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "client/cli/command.h"

int main(int argc, char** argv) {
  // Debian's Abseil checks every Mutex::Lock, including gRPC's, for deadlocks under one
  // process-wide lock, which is slow.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  try {
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    return logprobd::client::RunCli(
        arguments, {.out = std::cout, .err = std::cerr, .is_terminal = isatty(STDERR_FILENO) != 0});
  } catch (const std::exception& error) {
    // Only the standard library throws here: std::bad_alloc when memory runs out.
    std::cerr << "logprobctl: " << error.what() << '\n';
    return logprobd::client::kExitFailure;
  }
}
