#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "server/app/config_sources.h"

namespace logprobd {
namespace {

constexpr absl::string_view kPrefix = "LOGPROBD_";

/// Variables that the clients read: a shell that has them set may also start a server.
constexpr absl::string_view kClientVariables[] = {"LOGPROBD_ADDRESS", "LOGPROBD_TIMEOUT_S",
                                                  "LOGPROBD_MAX_INFLIGHT", "LOGPROBD_TRANSPORT"};

std::string VariableOf(absl::string_view flag) {
  return absl::StrCat(kPrefix, absl::AsciiStrToUpper(absl::StrReplaceAll(flag, {{"-", "_"}})));
}

}  // namespace

absl::StatusOr<std::vector<Setting>> ReadEnvironment(absl::Span<const std::string> environment) {
  std::vector<Setting> settings;
  for (const std::string& entry : environment) {
    const size_t equals = entry.find('=');
    const std::string name = entry.substr(0, equals);
    absl::string_view suffix = name;
    if (equals == std::string::npos || !absl::ConsumePrefix(&suffix, kPrefix) ||
        absl::c_find(kClientVariables, name) != std::end(kClientVariables)) {
      continue;
    }
    const Flag* const flag = FindFlag(absl::AsciiStrToLower(suffix));
    if (flag == nullptr || VariableOf(flag->name) != name) {
      return absl::InvalidArgumentError(absl::StrCat(
          "environment variable ", name, " is not a setting of logprobd; the nearest is ",
          VariableOf(NearestFlag(absl::AsciiStrToLower(suffix)))));
    }
    if (flag->command_line_only) {
      return absl::InvalidArgumentError(absl::StrCat(
          "environment variable ", name, ": --", flag->name, " works on the command line only"));
    }
    settings.push_back({flag, {entry.substr(equals + 1)}, name});
  }
  return settings;
}

}  // namespace logprobd
