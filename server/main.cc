#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/app/run/run.h"
#include "server/base/log.h"

namespace {

/// Blocks SIGHUP, whose default action would end the process until StopSignals takes it. A system
/// call of its own, since the functions of a sanitizer may not work yet.
void BlockReloads(int /*argc*/, char** /*argv*/, char** /*environment*/) {
  const uint64_t hangup = uint64_t{1} << (SIGHUP - 1);
  syscall(SYS_rt_sigprocmask, SIG_BLOCK, &hangup, nullptr, sizeof(hangup));
}

/// Runs before the constructors of the shared libraries, which take most of the time until main.
[[gnu::section(".preinit_array"), gnu::used]] void (*const block_reloads)(int, char**,
                                                                          char**) = BlockReloads;

}  // namespace

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
