#include "client/cli/bench/machine_info.h"

#include <sched.h>

#include <fstream>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace logprobd::client {

std::string CpuModelOf(absl::string_view cpuinfo) {
  for (absl::string_view line : absl::StrSplit(cpuinfo, '\n')) {
    if (!absl::ConsumePrefix(&line, "model name")) continue;
    line = absl::StripAsciiWhitespace(line);
    absl::ConsumePrefix(&line, ":");
    return std::string(absl::StripAsciiWhitespace(line));
  }
  return "unknown";
}

MachineInfo ReadMachineInfo() {
  std::ifstream file("/proc/cpuinfo");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  cpu_set_t allowed;
  const bool is_known = sched_getaffinity(0, sizeof(allowed), &allowed) == 0;
  return {.cpu_model = CpuModelOf(text),
          .cores = is_known ? CPU_COUNT(&allowed) : 1,
          .date = absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone())};
}

std::string CommandLineText(const std::vector<std::string>& arguments) {
  std::string text = "logprobctl";
  for (const std::string& argument : arguments) {
    const bool is_plain =
        !argument.empty() && argument.find_first_not_of(
                                 "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                 "-_=:,./@%+[]") == std::string::npos;
    absl::StrAppend(&text, " ",
                    is_plain
                        ? argument
                        : absl::StrCat("'", absl::StrReplaceAll(argument, {{"'", "'\\''"}}), "'"));
  }
  return text;
}

}  // namespace logprobd::client
