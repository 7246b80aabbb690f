#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// Folders that must contain every file that is opened at a client's request. Thread-safe.
///
/// The check uses the real location of an opened file, which the kernel reports after following all
/// links, and exactly that file is then read. Therefore no link, "..", magic link of /proc or
/// concurrent change leads out of the roots. A link may lead from one root into another.
class AllowedRoots {
 public:
  /// `folders` must contain at least one folder. Returns NOT_FOUND for a path that does not exist
  /// and INVALID_ARGUMENT for one that is not a folder; both name the path.
  static absl::StatusOr<AllowedRoots> Create(const std::vector<std::string>& folders);

  /// Checks a folder or file that a client names. Returns INVALID_ARGUMENT if the path is empty,
  /// not absolute or contains a NUL; PERMISSION_DENIED if it contains "..", is not below a root,
  /// leads out of the roots or must not be accessed; and NOT_FOUND if it cannot be opened for
  /// another reason.
  absl::Status CheckPath(const std::string& path) const;

  /// Checks the file that is open as `descriptor` (O_PATH suffices). Returns PERMISSION_DENIED,
  /// which names `path`, if the file is outside the roots.
  absl::Status CheckDescriptor(int descriptor, const std::string& path) const;

  /// Returns the roots for messages, such as "'/models', '/data/weights'".
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
