#include "server/base/host.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/base/log.h"

namespace logprobd {
namespace {

/// Returns the number in a file of the control group, or nullopt if the file contains "max" or does
/// not exist.
std::optional<int64_t> NumberIn(const std::string& path) {
  std::ifstream file(path);
  int64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

HostMemorySize ReadMeminfo(const std::string& path) {
  constexpr int64_t kUnit = 1024;
  HostMemorySize size;
  std::ifstream file(path);
  std::string name;
  int64_t kib = 0;
  std::string unit;
  while (file >> name >> kib && std::getline(file, unit)) {
    if (name == "MemTotal:") {
      size.total_bytes = kib * kUnit;
    } else if (name == "MemAvailable:") {
      size.available_bytes = kib * kUnit;
    }
  }
  return size;
}

/// Maximum length of a thread name that the system stores, without the terminating NUL.
constexpr size_t kNameBytesMax = 15;

[[noreturn]] void EndProcess(const std::string& name, absl::string_view what) {
  LogError("a thread did not catch an exception; the process aborts",
           {{"thread", name}, {"what", what}});
  std::abort();
}

}  // namespace

HostMemorySize ReadHostMemorySize(const std::string& root) {
  HostMemorySize size = ReadMeminfo(absl::StrCat(root, "/proc/meminfo"));
  const std::string group = absl::StrCat(root, "/sys/fs/cgroup/");
  const std::optional<int64_t> limit = NumberIn(absl::StrCat(group, "memory.max"));
  if (limit.has_value() && (size.total_bytes == 0 || *limit < size.total_bytes)) {
    const int64_t used = NumberIn(absl::StrCat(group, "memory.current")).value_or(0);
    const int64_t left = std::max<int64_t>(*limit - used, 0);
    size.available_bytes = size.available_bytes == 0 ? left : std::min(size.available_bytes, left);
    size.total_bytes = *limit;
  }
  return size;
}

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
        absl::StrCat("the system cannot start the thread ", name, ": ", e.what()));
  }
}

}  // namespace logprobd
