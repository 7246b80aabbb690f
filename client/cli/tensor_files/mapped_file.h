#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace logprobd::client {

/// A file mapped for reading. Truncating it while it is mapped ends the process, as for every
/// program that maps files.
class MappedFile {
 public:
  /// NOT_FOUND, PERMISSION_DENIED or INVALID_ARGUMENT (a folder) with the path in the message.
  static absl::StatusOr<std::shared_ptr<const MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  absl::Span<const std::byte> data() const { return data_; }

 private:
  explicit MappedFile(absl::Span<const std::byte> data) : data_(data) {}
  absl::Span<const std::byte> data_;
};

}  // namespace logprobd::client
