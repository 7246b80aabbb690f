#include "server/weights/allowed_roots.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/weights/untrusted_text.h"

namespace logprobd {

namespace fs = std::filesystem;

namespace {

bool IsBelow(absl::string_view path, absl::string_view root) {
  return path == root || root == "/" ||
         (absl::StartsWith(path, root) && path.size() > root.size() && path[root.size()] == '/');
}

/// Returns the lexically normal form without a trailing slash.
std::string Normal(const fs::path& path) {
  std::string text = path.lexically_normal().string();
  if (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

}  // namespace

absl::StatusOr<AllowedRoots> AllowedRoots::Create(const std::vector<std::string>& folders) {
  if (folders.empty()) return absl::InvalidArgumentError("there must be at least one folder");
  AllowedRoots roots;
  for (const std::string& folder : folders) {
    std::error_code error;
    const fs::path real = fs::canonical(folder, error);
    if (error) {
      return absl::NotFoundError(absl::StrCat(PrintableName(folder), ": ", error.message()));
    }
    if (!fs::is_directory(real, error)) {
      return absl::InvalidArgumentError(absl::StrCat(PrintableName(folder), " is not a folder"));
    }
    roots.roots_.push_back({.given = Normal(fs::absolute(folder)), .real = real.string()});
  }
  return roots;
}

absl::Status AllowedRoots::CheckPath(const std::string& path) const {
  if (path.empty() || path.front() != '/' || path.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("path: ", path.empty() ? "it is empty" : PrintableName(path),
                     "; it must be an absolute path on the server's host"));
  }
  const fs::path asked(path);
  if (std::find(asked.begin(), asked.end(), "..") != asked.end()) {
    return absl::PermissionDeniedError(
        absl::StrCat("path: ", PrintableName(path), " must not contain \"..\""));
  }
  // Refuses a path outside the roots without accessing the file system, so that a client cannot
  // find out whether the path exists.
  const std::string normal = Normal(asked);
  if (std::none_of(roots_.begin(), roots_.end(), [&normal](const Root& root) {
        return IsBelow(normal, root.given) || IsBelow(normal, root.real);
      })) {
    return absl::PermissionDeniedError(absl::StrCat("path: ", PrintableName(path),
                                                    " is not below an allowed root (", Text(),
                                                    "); the server's --weights-root adds others"));
  }
  const int descriptor = open(path.c_str(), O_PATH | O_CLOEXEC);
  if (descriptor < 0) {
    const std::string message =
        absl::StrCat("path: ", PrintableName(path), ": ", std::strerror(errno));
    return errno == EACCES ? absl::PermissionDeniedError(message) : absl::NotFoundError(message);
  }
  absl::Status status = CheckDescriptor(descriptor, path);
  close(descriptor);
  return status;
}

absl::Status AllowedRoots::CheckDescriptor(int descriptor, const std::string& path) const {
  std::array<char, PATH_MAX> real{};
  const ssize_t length =
      readlink(absl::StrCat("/proc/self/fd/", descriptor).c_str(), real.data(), real.size());
  if (length < 0 || static_cast<size_t>(length) >= real.size()) {
    return absl::PermissionDeniedError(
        absl::StrCat(PrintableName(path), ": its location cannot be read from /proc"));
  }
  const absl::string_view location(real.data(), static_cast<size_t>(length));
  if (std::any_of(roots_.begin(), roots_.end(),
                  [location](const Root& root) { return IsBelow(location, root.real); })) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(absl::StrCat(PrintableName(path),
                                                  " leads out of the allowed roots (", Text(),
                                                  "); the server's --weights-root adds others"));
}

std::string AllowedRoots::Text() const {
  return absl::StrJoin(roots_, ", ", [](std::string* out, const Root& root) {
    absl::StrAppend(out, PrintableName(root.given));
  });
}

}  // namespace logprobd
