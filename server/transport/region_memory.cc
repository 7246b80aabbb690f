#include "server/transport/region_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
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

/// Of /proc/meminfo: what can be had without swapping.
int64_t AvailableOfHost() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  int64_t kibibytes = 0;
  std::string unit;
  while (file >> name >> kibibytes) {
    if (name == "MemAvailable:") {
      return kibibytes << 10;
    }
    std::getline(file, unit);
  }
  return 0;
}

/// What the limit of the control group leaves; "max", or no such file: no limit.
int64_t AvailableOfControlGroup() {
  std::ifstream max_file("/sys/fs/cgroup/memory.max");
  std::ifstream current_file("/sys/fs/cgroup/memory.current");
  int64_t max = 0;
  int64_t current = 0;
  if (max_file >> max && current_file >> current) {
    return std::max<int64_t>(max - current, 0);
  }
  return std::numeric_limits<int64_t>::max();
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

int64_t AvailableHostBytes() { return std::min(AvailableOfHost(), AvailableOfControlGroup()); }

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
