#include "server/app/local_path.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace logprobd {
namespace {

constexpr mode_t kOwnerOnly = S_IRWXU;
constexpr mode_t kOthers = S_IRWXG | S_IRWXO;

/// Of our own in a folder that others write to.
std::string FolderInTmp() { return absl::StrCat("/tmp/logprobd-", geteuid()); }

/// What is wrong with a folder; empty: nothing.
std::string WhyNot(const std::string& folder) {
  if (!absl::StartsWith(folder, "/")) {
    return "no absolute path";
  }
  struct stat facts = {};
  // Not through a link: in /tmp it could be another user's.
  if (lstat(folder.c_str(), &facts) != 0) {
    return std::strerror(errno);
  }
  if (!S_ISDIR(facts.st_mode) || facts.st_uid != geteuid()) {
    return "no folder of this user";
  }
  if ((facts.st_mode & kOthers) != 0) {
    return "others may enter it";
  }
  return access(folder.c_str(), W_OK | X_OK) == 0 ? "" : std::strerror(errno);
}

std::string NameOf(int port) {
  if (port != 0) {
    return absl::StrCat("logprobd-", port, ".sock");
  }
  uint32_t chance = 0;
  (void)!getrandom(&chance, sizeof(chance), 0);
  return absl::StrCat("logprobd-", absl::Hex(chance, absl::kZeroPad8), ".sock");
}

}  // namespace

std::vector<std::string> LocalFolders() {
  std::vector<std::string> folders;
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR"); runtime != nullptr && *runtime != 0) {
    folders.emplace_back(runtime);
  }
  folders.push_back(absl::StrCat("/run/user/", geteuid()));
  folders.push_back(FolderInTmp());
  return folders;
}

absl::StatusOr<std::string> AutoLocalPath(int port, const std::vector<std::string>& folders) {
  std::vector<std::string> reasons;
  for (const std::string& folder : folders) {
    if (folder == FolderInTmp()) {
      (void)mkdir(folder.c_str(), kOwnerOnly);  // looked at next
    }
    const std::string reason = WhyNot(folder);
    if (reason.empty()) {
      return absl::StrCat(folder, "/", NameOf(port));
    }
    reasons.push_back(absl::StrCat(folder, ": ", reason));
  }
  return absl::UnavailableError(absl::StrJoin(reasons, "; "));
}

}  // namespace logprobd
