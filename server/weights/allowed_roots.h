#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// Folders below which everything must lie that is opened on a client's word. Thread-safe.
///
/// What counts is where an opened file really is, asked of the kernel after all links have been
/// followed, and that very file is then read: no link, "..", magic link of /proc or change on the
/// way leads out. A link may lead from one root into another.
class AllowedRoots {
 public:
  /// Existing folders, at least one. NOT_FOUND or INVALID_ARGUMENT names the one that is not.
  static absl::StatusOr<AllowedRoots> Create(const std::vector<std::string>& folders);

  /// Of a folder or file that a client names. INVALID_ARGUMENT: empty, not absolute or with a NUL;
  /// PERMISSION_DENIED: it has "..", is not below a root, or leads out; NOT_FOUND.
  absl::Status CheckPath(const std::string& path) const;

  /// Of what `descriptor` (O_PATH will do) has been opened as. PERMISSION_DENIED names `path`.
  absl::Status CheckDescriptor(int descriptor, const std::string& path) const;

  /// "'/models', '/data/weights'"
  std::string Text() const;

 private:
  struct Root {
    std::string given;  ///< Absolute, without "." and "..".
    std::string real;   ///< Without links.
  };

  AllowedRoots() = default;

  std::vector<Root> roots_;
};

}  // namespace logprobd
