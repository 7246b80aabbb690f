#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/weights/allowed_roots.h"
#include "server/weights/random_access_bytes.h"

namespace logprobd {

/// Rows of equal length, one after the other in the file, apart in memory.
struct StridedRows {
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
  std::byte* out = nullptr;
  int64_t row_pitch_bytes = 0;  ///< From one row to the next in memory, >= row_bytes.
};

/// A regular file that is open for reading. Only pread: a file that shrinks under a mapping would
/// end the process. Thread-safe.
class RegularFile final : public RandomAccessBytes {
 public:
  /// Follows symbolic links (caches of models consist of them); what they lead to must be a regular
  /// file. Never waits on a FIFO. NOT_FOUND, PERMISSION_DENIED, or INVALID_ARGUMENT when it is
  /// something else than a file. With `roots` also PERMISSION_DENIED when it lies elsewhere.
  static absl::StatusOr<std::shared_ptr<RegularFile>> Open(const std::string& path,
                                                           const AllowedRoots* roots = nullptr);

  ~RegularFile() override;
  RegularFile(const RegularFile&) = delete;
  RegularFile& operator=(const RegularFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size_bytes() const override { return size_bytes_; }
  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override;

  /// As Read, for rows; few system calls whatever the pitch.
  absl::Status ReadRows(int64_t offset, const StridedRows& rows) const;

 private:
  RegularFile(std::string path, int descriptor, int64_t size_bytes, timespec modified);
  absl::Status CheckUnchanged() const;

  std::string path_;
  int descriptor_;
  int64_t size_bytes_;
  timespec modified_;
};

namespace internal {

/// preadv, or what a test puts in its place: pieces, their number, offset.
using ReadVectorFunction = std::function<ssize_t(const iovec*, int, off_t)>;

/// Reads until all rows are full, through interruptions and short reads. DATA_LOSS at an early end
/// of the file or another error.
absl::Status ReadFully(const ReadVectorFunction& read_vector, int64_t offset,
                       const StridedRows& rows);

}  // namespace internal
}  // namespace logprobd
