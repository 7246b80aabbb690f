#include "server/base/start_thread.h"

#include <pthread.h>

#include <cstdlib>
#include <exception>
#include <string>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/base/log.h"

namespace logprobd {
namespace {

/// The system's limit, without the NUL.
constexpr size_t kNameBytesMax = 15;

[[noreturn]] void EndProcess(const std::string& name, absl::string_view what) {
  LogError("an exception left a thread: ending", {{"thread", name}, {"what", what}});
  std::abort();
}

}  // namespace

absl::StatusOr<std::thread> StartThread(absl::string_view name, absl::AnyInvocable<void()> body) {
  const std::string short_name(name.substr(0, kNameBytesMax));
  try {
    return std::thread([short_name, body = std::move(body)]() mutable {
      pthread_setname_np(pthread_self(), short_name.c_str());
      try {
        body();
      } catch (const std::exception& e) {
        EndProcess(short_name, e.what());
      } catch (...) {
        EndProcess(short_name, "not a std::exception");
      }
    });
  } catch (const std::system_error& e) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the thread ", name, " cannot be started: ", e.what()));
  }
}

}  // namespace logprobd
