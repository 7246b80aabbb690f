#include "tests/bench/server_child.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <iostream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

extern char** environ;

namespace logprobd::testing {
namespace {

constexpr char kThisProgram[] = "/proc/self/exe";

/// Reads up to a newline; empty at the end of the file.
std::string ReadLine(int file) {
  std::string line;
  for (char c = 0; read(file, &c, 1) == 1 && c != '\n';) line += c;
  return line;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServerChild>> ServerChild::Start(const std::string& kind) {
  int input[2];
  int output[2];
  if (pipe2(input, O_CLOEXEC) != 0 || pipe2(output, O_CLOEXEC) != 0) {
    return absl::ErrnoToStatus(errno, "pipe");
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output[1], STDOUT_FILENO);
  std::string program = kThisProgram;
  std::string flag = "--serve";
  std::string value = kind;
  char* const arguments[] = {program.data(), flag.data(), value.data(), nullptr};
  pid_t pid = 0;
  const int error = posix_spawn(&pid, kThisProgram, &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  close(input[0]);
  close(output[1]);
  if (error != 0) {
    close(input[1]);
    close(output[0]);
    return absl::ErrnoToStatus(error, kThisProgram);
  }
  std::unique_ptr<ServerChild> child(new ServerChild(pid, input[1]));
  child->address_ = ReadLine(output[0]);
  close(output[0]);
  if (child->address_.empty()) {
    return absl::InternalError(absl::StrCat("the server ", kind, " did not start"));
  }
  return child;
}

ServerChild::~ServerChild() {
  close(input_);
  waitpid(pid_, nullptr, 0);
}

double ServerChild::CpuSeconds() const {
  clockid_t clock = 0;
  timespec time = {};
  if (clock_getcpuclockid(pid_, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

void ServeUntilClosed(const std::string& address) {
  std::cout << address << std::endl;
  ReadLine(STDIN_FILENO);
}

}  // namespace logprobd::testing
