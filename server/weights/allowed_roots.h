#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// Folders that must contain every file that is opened at a client's request. Thread-safe.
///
/// The check uses the real location of an opened file, which the kernel tells after following all
/// links, and exactly that file is then read. So no link, "..", magic link of /proc or concurrent
/// change leads out of the roots. A link may lead from one root into another.
class AllowedRoots {
 public:
  /// `folders`: at least one, all existing. NOT_FOUND or INVALID_ARGUMENT names a path that does
  /// not exist or is not a folder.
  static absl::StatusOr<AllowedRoots> Create(const std::vector<std::string>& folders);

  /// Checks a folder or file that a client names. INVALID_ARGUMENT: the path is empty, not absolute
  /// or contains a NUL. PERMISSION_DENIED: it contains "..", is not below a root, or leads out of
  /// the roots. NOT_FOUND.
  absl::Status CheckPath(const std::string& path) const;

  /// Checks the file that is open as `descriptor` (O_PATH suffices). PERMISSION_DENIED names
  /// `path`.
  absl::Status CheckDescriptor(int descriptor, const std::string& path) const;

  /// The roots for messages: "'/models', '/data/weights'".
  std::string Text() const;

 private:
  struct Root {
    std::string given;  ///< Absolute, without "." and "..".
    std::string real;   ///< The same folder without links.
  };

  AllowedRoots() = default;

  std::vector<Root> roots_;
};

}  // namespace logprobd
