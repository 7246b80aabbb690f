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

namespace logprobd {

/// Bytes of known length with random access: a file, or memory in tests. Thread-safe.
class RandomAccessBytes {
 public:
  virtual ~RandomAccessBytes() = default;

  virtual int64_t size_bytes() const = 0;

  /// Fills `out` with the bytes from `offset` on. Returns OUT_OF_RANGE if they lie beyond
  /// size_bytes(), and DATA_LOSS if they cannot be read or have changed since opening.
  virtual absl::Status Read(int64_t offset, absl::Span<std::byte> out) const = 0;
};

/// Rows of equal length, contiguous in the file and `row_pitch_bytes` apart in memory.
struct StridedRows {
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
  std::byte* out = nullptr;
  int64_t row_pitch_bytes = 0;  ///< Distance between rows in memory, >= row_bytes.
};

/// A regular file that is open for reading. It is read with preadv and never mapped, because a
/// mapped file that shrinks would end the process. Thread-safe.
class RegularFile final : public RandomAccessBytes {
 public:
  /// Opens a file. Follows symbolic links, because download caches of models consist of them; the
  /// target must be a regular file. Never waits on a FIFO. Returns NOT_FOUND if the file does not
  /// exist, PERMISSION_DENIED if it is not readable or is outside `roots` (null means no
  /// restriction), INVALID_ARGUMENT if it is not a regular file, and UNAVAILABLE for an error of
  /// the file system that may pass.
  static absl::StatusOr<std::shared_ptr<RegularFile>> Open(const std::string& path,
                                                           const AllowedRoots* roots = nullptr);

  ~RegularFile() override;
  RegularFile(const RegularFile&) = delete;
  RegularFile& operator=(const RegularFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size_bytes() const override { return size_bytes_; }
  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override;

  /// Reads rows with few system calls, whatever the pitch. Returns the errors of Read.
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

/// Signature of preadv without the descriptor (pieces, their number, offset), so that tests can
/// fake it.
using ReadVectorFunction = std::function<ssize_t(const iovec*, int, off_t)>;

/// Reads until all rows are full, also after interruptions and short reads. Returns DATA_LOSS if
/// the file ends early or a read fails.
absl::Status ReadFully(const ReadVectorFunction& read_vector, int64_t offset,
                       const StridedRows& rows);

}  // namespace internal

}  // namespace logprobd
