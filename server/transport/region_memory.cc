#include "server/transport/region_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

absl::Status NotGiven(int64_t bytes, absl::string_view call) {
  return absl::ResourceExhaustedError(absl::StrCat("the host gives no ", bytes,
                                                   " bytes of memory to share: ", call, ": ",
                                                   std::strerror(errno)));
}

/// Takes the pages now: with a full host the client gets an error, and nobody a SIGBUS later.
bool TakePages(int file, int64_t bytes) {
  while (fallocate(file, 0, 0, bytes) != 0) {
    if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace

int64_t RegionMemory::RoundUp(int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  if (bytes > std::numeric_limits<int64_t>::max() - page) {
    return std::numeric_limits<int64_t>::max() / page * page;
  }
  return (bytes + page - 1) / page * page;
}

absl::StatusOr<RegionMemory> RegionMemory::Create(int64_t bytes, HostPinning& pinning,
                                                  int64_t available_bytes) {
  bytes = RoundUp(bytes);
  if (bytes > available_bytes - available_bytes / 8) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the host has no ", bytes, " bytes of memory to share: it has ",
                     available_bytes, ", of which an eighth stays"));
  }
  RegionMemory memory(pinning);
  memory.file_ = FileDescriptor(memfd_create("logprobd-region", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const int file = memory.file_.get();
  if (file < 0) {
    return NotGiven(bytes, "memfd_create");
  }
  if (ftruncate(file, bytes) != 0) {
    return NotGiven(bytes, "ftruncate");
  }
  if (!TakePages(file, bytes)) {
    return NotGiven(bytes, "fallocate");
  }
  const auto size = static_cast<size_t>(bytes);
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  if (mapped == MAP_FAILED) {
    return NotGiven(bytes, "mmap");
  }
  memory.mapped_ = absl::MakeSpan(static_cast<std::byte*>(mapped), size);
  if (fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return NotGiven(bytes, "sealing");
  }
  LOGPROBD_RETURN_IF_ERROR(pinning.Pin(memory.mapped_));
  memory.is_pinned_ = true;
  return memory;
}

RegionMemory::RegionMemory(RegionMemory&& other) noexcept
    : file_(std::move(other.file_)),
      mapped_(std::exchange(other.mapped_, {})),
      pinning_(other.pinning_),
      is_pinned_(std::exchange(other.is_pinned_, false)) {}

RegionMemory::~RegionMemory() {
  if (mapped_.empty()) {
    return;
  }
  if (is_pinned_) {
    pinning_->Unpin(mapped_);
  }
  munmap(mapped_.data(), mapped_.size());
}

}  // namespace logprobd
