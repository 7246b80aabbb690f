#include "server/engine/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace logprobd {

absl::StatusOr<HostMemory> HostMemory::Allocate(int64_t size_bytes) {
  HostMemory memory;
  memory.size_bytes_ = std::max<int64_t>(size_bytes, 1);
  void* mapped = mmap(nullptr, static_cast<size_t>(memory.size_bytes_), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no ", size_bytes, " bytes of host memory: ", std::strerror(errno)));
  }
  memory.data_ = static_cast<std::byte*>(mapped);
  // A wish: where it is refused, ordinary pages serve.
  madvise(mapped, static_cast<size_t>(memory.size_bytes_), MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
  // Taken now, so that what does not fit shows at start and not under load. Old kernels do not know
  // the call: there pages come when they are first used.
  if (madvise(mapped, static_cast<size_t>(memory.size_bytes_), MADV_POPULATE_WRITE) != 0 &&
      errno != EINVAL) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no ", size_bytes, " bytes of host memory: ", std::strerror(errno)));
  }
#endif
  return memory;
}

HostMemory::~HostMemory() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_bytes_));
}

}  // namespace logprobd
