#include "server/metrics/process_stats.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace logprobd {
namespace {

std::string ReadFile(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

double Number(absl::string_view text) {
  double value = 0;
  return absl::SimpleAtod(text, &value) ? value : 0;
}

/// Seconds since the epoch at which the machine started.
double BootTime() {
  const std::string stat = ReadFile("/proc/stat");
  for (const absl::string_view line : absl::StrSplit(stat, '\n')) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
    if (words.size() == 2 && words[0] == "btime") {
      return Number(words[1]);
    }
  }
  return 0;
}

double CountOpenFds() {
  std::error_code error;
  const std::filesystem::directory_iterator open("/proc/self/fd", error);
  if (error) {
    return 0;
  }
  int64_t count = -1;  // the directory itself is open while it is read
  for (auto entry = begin(open); entry != end(open); entry.increment(error)) {
    ++count;
  }
  return static_cast<double>(count);
}

}  // namespace

ProcessStats ReadProcessStats() {
  ProcessStats stats;
  const std::string stat = ReadFile("/proc/self/stat");
  // The second field is the program's name in parentheses and may hold anything.
  const size_t name_end = stat.rfind(')');
  if (name_end != std::string::npos) {
    // From field 3 on, so field n of proc(5) is words[n - 3].
    const std::vector<std::string> words =
        absl::StrSplit(absl::string_view(stat).substr(name_end + 1), ' ', absl::SkipEmpty());
    const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    if (words.size() > 21 && ticks > 0) {
      stats.cpu_seconds = (Number(words[11]) + Number(words[12])) / ticks;
      stats.start_time_seconds = BootTime() + Number(words[19]) / ticks;
      stats.virtual_bytes = Number(words[20]);
      stats.resident_bytes = Number(words[21]) * static_cast<double>(sysconf(_SC_PAGESIZE));
    }
  }
  stats.open_fds = CountOpenFds();
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    stats.max_fds = static_cast<double>(limit.rlim_cur);
  }
  return stats;
}

}  // namespace logprobd
