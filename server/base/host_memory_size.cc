#include "server/base/host_memory_size.h"

#include <algorithm>
#include <fstream>
#include <optional>

#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

/// The number that a file of the control group holds; nothing for "max" or without the file.
std::optional<int64_t> NumberIn(const std::string& path) {
  std::ifstream file(path);
  int64_t number = 0;
  if (file >> number) {
    return number;
  }
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

}  // namespace logprobd
