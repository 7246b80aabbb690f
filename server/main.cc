#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/app/run.h"

int main(int argc, char** argv) {
  // Debian's Abseil looks for deadlocks in every Mutex::Lock, gRPC's too, under one lock of the
  // process.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    environment.emplace_back(*entry);
  }
  try {
    return logprobd::RunLogprobd(std::vector<std::string>(argv + (argc > 0 ? 1 : 0), argv + argc),
                                 environment);
  } catch (const std::exception& e) {
    // Only the library throws here: out of memory, or a thread that cannot be started.
    std::fprintf(stderr, "logprobd: error: %s\n", e.what());
    return logprobd::kExitFailed;
  }
}
