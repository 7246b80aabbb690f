#include <unistd.h>

#include <exception>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/app/run/run.h"
#include "server/base/log.h"

int main(int argc, char** argv) {
  // Debian's Abseil checks every Mutex::Lock for deadlocks, including gRPC's, and takes a
  // process-wide lock for each check.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  try {
    return logprobd::RunLogprobd(std::vector<std::string>(argv + (argc > 0 ? 1 : 0), argv + argc),
                                 environment);
  } catch (const std::exception& e) {
    // Only libraries throw here, when memory runs out or a thread cannot be started.
    logprobd::WriteToLog(std::string("logprobd: error: ") + e.what() + "\n");
    return logprobd::kExitFailed;
  }
}
