#include "server/weights/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/weights/untrusted_text.h"

namespace logprobd {
namespace {

// Maximum numbers of bytes and pieces in one system call. They are small enough that an
// interruption is noticed soon, and large enough for speed.
constexpr int64_t kReadBytesMax = int64_t{16} << 20;
constexpr int kPiecesMax = 256;

absl::Status OpenError(const std::string& path, int error) {
  const std::string message =
      absl::StrCat("cannot open ", PrintableName(path), ": ", std::strerror(error));
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(
          absl::StrCat(message, "; make it readable for the user of the server"));
    case EMFILE:
    case ENFILE:
      return absl::ResourceExhaustedError(message);
    case EIO:
      return absl::DataLossError(message);
    case ELOOP:
    case ENAMETOOLONG:
      return absl::InvalidArgumentError(message);
    default:
      return absl::UnavailableError(message);
  }
}

absl::Status NotRegular(const std::string& path) {
  return absl::InvalidArgumentError(absl::StrCat(PrintableName(path), " is not a regular file"));
}

bool SameTime(const timespec& a, const timespec& b) {
  return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

}  // namespace

absl::StatusOr<std::shared_ptr<RegularFile>> RegularFile::Open(const std::string& path,
                                                               const AllowedRoots* roots) {
  // Checks the type before opening the file for reading, because opening a device may have side
  // effects.
  const int path_only = open(path.c_str(), O_PATH | O_CLOEXEC);
  if (path_only < 0) return OpenError(path, errno);
  const absl::Cleanup close_path_only = [path_only] { close(path_only); };
  if (roots != nullptr) {
    LOGPROBD_RETURN_IF_ERROR(roots->CheckDescriptor(path_only, path));
  }
  struct stat info {};
  if (fstat(path_only, &info) != 0 || !S_ISREG(info.st_mode)) return NotRegular(path);
  // By now the path may lead elsewhere. If roots restrict it, opens exactly the file that was
  // checked.
  const std::string opened = roots == nullptr ? path : absl::StrCat("/proc/self/fd/", path_only);
  const int descriptor = open(opened.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (descriptor < 0) return OpenError(path, errno);
  if (fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(descriptor);
    return NotRegular(path);
  }
  return std::shared_ptr<RegularFile>(
      new RegularFile(path, descriptor, info.st_size, info.st_mtim));
}

RegularFile::RegularFile(std::string path, int descriptor, int64_t size_bytes, timespec modified)
    : path_(std::move(path)),
      descriptor_(descriptor),
      size_bytes_(size_bytes),
      modified_(modified) {}

RegularFile::~RegularFile() { close(descriptor_); }

absl::Status RegularFile::Read(int64_t offset, absl::Span<std::byte> out) const {
  const auto bytes = static_cast<int64_t>(out.size());
  return ReadRows(offset,
                  {.num_rows = 1, .row_bytes = bytes, .out = out.data(), .row_pitch_bytes = bytes});
}

absl::Status RegularFile::ReadRows(int64_t offset, const StridedRows& rows) const {
  const int64_t bytes = rows.num_rows * rows.row_bytes;
  if (offset < 0 || bytes < 0 || offset > size_bytes_ || bytes > size_bytes_ - offset) {
    return absl::OutOfRangeError(absl::StrCat("bytes ", offset, " to ", offset + bytes,
                                              " are outside ", PrintableName(path_), ", which has ",
                                              size_bytes_, " bytes"));
  }
  const absl::Status status = internal::ReadFully(
      [this](const iovec* pieces, int num_pieces, off_t from) {
        return preadv(descriptor_, pieces, num_pieces, from);
      },
      offset, rows);
  if (!status.ok()) return WithContext(status, PrintableName(path_));
  return CheckUnchanged();
}

// Checks that the file has not changed since it was opened. Is called after each read, so that
// changes before and during the read are found.
absl::Status RegularFile::CheckUnchanged() const {
  struct stat info {};
  if (fstat(descriptor_, &info) != 0) {
    return absl::DataLossError(
        absl::StrCat(PrintableName(path_), ": fstat: ", std::strerror(errno)));
  }
  if (info.st_size != size_bytes_ || !SameTime(info.st_mtim, modified_)) {
    return absl::DataLossError(absl::StrCat(
        PrintableName(path_), " changed while it was read (", size_bytes_, " bytes when opened, ",
        info.st_size, " now); write new weights to a new file and rename it into place"));
  }
  return absl::OkStatus();
}

namespace internal {

absl::Status ReadFully(const ReadVectorFunction& read_vector, int64_t offset,
                       const StridedRows& rows) {
  const bool contiguous = rows.row_pitch_bytes == rows.row_bytes;
  const int64_t total = rows.num_rows * rows.row_bytes;
  std::array<iovec, kPiecesMax> pieces;
  int64_t done = 0;
  while (done < total) {
    int num_pieces = 0;
    int64_t planned = 0;
    while (num_pieces < kPiecesMax && done + planned < total && planned < kReadBytesMax) {
      const int64_t at = done + planned;
      const int64_t row = contiguous ? 0 : at / rows.row_bytes;
      const int64_t within = contiguous ? at : at % rows.row_bytes;
      const int64_t left = (contiguous ? total : rows.row_bytes) - within;
      const int64_t length = std::min(left, kReadBytesMax - planned);
      pieces[static_cast<size_t>(num_pieces++)] = {rows.out + row * rows.row_pitch_bytes + within,
                                                   static_cast<size_t>(length)};
      planned += length;
    }
    const ssize_t got = read_vector(pieces.data(), num_pieces, offset + done);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got < 0) {
      return absl::DataLossError(
          absl::StrCat("cannot read at byte ", offset + done, ": ", std::strerror(errno)));
    }
    if (got == 0) {
      return absl::DataLossError(absl::StrCat("the file ends at byte ", offset + done,
                                              "; it has shrunk since it was opened"));
    }
    done += got;
  }
  return absl::OkStatus();
}

}  // namespace internal
}  // namespace logprobd
