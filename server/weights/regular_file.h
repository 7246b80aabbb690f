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

  /// Fills `out` with the bytes from `offset` on. OUT_OF_RANGE: beyond size_bytes(). DATA_LOSS: the
  /// bytes cannot be read or have changed since opening.
  virtual absl::Status Read(int64_t offset, absl::Span<std::byte> out) const = 0;
};

/// Rows of equal length, contiguous in the file and `row_pitch_bytes` apart in memory.
struct StridedRows {
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
  std::byte* out = nullptr;
  int64_t row_pitch_bytes = 0;  ///< From one row to the next in memory, >= row_bytes.
};

/// A regular file that is open for reading. It is read with preadv and never mapped, because a
/// mapped file that shrinks would end the process. Thread-safe.
class RegularFile final : public RandomAccessBytes {
 public:
  /// Opens a file. Follows symbolic links, of which download caches of models consist; their target
  /// must be a regular file. Never waits on a FIFO. NOT_FOUND; PERMISSION_DENIED, also when the
  /// file is outside `roots` (null: no restriction); INVALID_ARGUMENT when it is not a regular
  /// file.
  static absl::StatusOr<std::shared_ptr<RegularFile>> Open(const std::string& path,
                                                           const AllowedRoots* roots = nullptr);

  ~RegularFile() override;
  RegularFile(const RegularFile&) = delete;
  RegularFile& operator=(const RegularFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size_bytes() const override { return size_bytes_; }
  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override;

  /// Reads rows, with few system calls whatever the pitch. Errors are those of Read.
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

/// Reads until all rows are full, also after interruptions and short reads. DATA_LOSS: the file
/// ends early, or another error.
absl::Status ReadFully(const ReadVectorFunction& read_vector, int64_t offset,
                       const StridedRows& rows);

}  // namespace internal

}  // namespace logprobd
