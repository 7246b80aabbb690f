#include <unistd.h>

#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "client/cli/command.h"

int main(int argc, char** argv) {
  // Debian's Abseil looks for deadlocks in every Mutex::Lock, gRPC's too, under one lock of the
  // process.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  try {
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    return logprobd::client::RunCli(
        arguments, {.out = std::cout, .err = std::cerr, .is_terminal = isatty(STDERR_FILENO) != 0});
  } catch (const std::exception& error) {
    // Only the standard library throws here: out of memory.
    std::cerr << "logprobctl: " << error.what() << '\n';
    return logprobd::client::kExitFailure;
  }
}
