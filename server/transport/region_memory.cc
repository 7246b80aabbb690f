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
#include "server/base/host.h"
#include "server/base/text.h"

namespace logprobd {
namespace {

absl::Status Refused(int64_t bytes, absl::string_view call) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "the host cannot share ", bytes, " bytes of memory: ", call, ": ", std::strerror(errno)));
}

/// Allocates the pages now, so that on a host without free memory the client gets an error and no
/// process gets a SIGBUS later.
bool TakePages(int file, int64_t bytes) {
  while (fallocate(file, 0, 0, bytes) != 0) {
    if (errno != EINTR) return false;
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
        absl::StrCat("the host cannot share ", bytes, " bytes of memory: ", available_bytes,
                     " bytes are available, and one eighth of them must stay free"));
  }
  RegionMemory memory(pinning);
  memory.file_ = FileDescriptor(memfd_create("logprobd-region", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const int file = memory.file_.get();
  if (file < 0) return Refused(bytes, "memfd_create");
  if (ftruncate(file, bytes) != 0) return Refused(bytes, "ftruncate");
  if (!TakePages(file, bytes)) return Refused(bytes, "fallocate");
  const auto size = static_cast<size_t>(bytes);
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  if (mapped == MAP_FAILED) return Refused(bytes, "mmap");
  memory.mapped_ = absl::MakeSpan(static_cast<std::byte*>(mapped), size);
  if (fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Refused(bytes, "fcntl(F_ADD_SEALS)");
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
  if (mapped_.empty()) return;
  if (is_pinned_) pinning_->Unpin(mapped_);
  munmap(mapped_.data(), mapped_.size());
}

absl::StatusOr<std::shared_ptr<RegionReaper>> RegionReaper::Create(int64_t bytes_max,
                                                                   Metrics& metrics) {
  std::shared_ptr<RegionReaper> reaper(new RegionReaper(bytes_max, metrics));
  LOGPROBD_ASSIGN_OR_RETURN(reaper->thread_,
                            StartThread("local-unmap", [self = reaper.get()] { self->Run(); }));
  return reaper;
}

absl::Status RegionReaper::Take(int64_t bytes) {
  const auto is_decided = [this, bytes]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return bytes <= bytes_max_ - bytes_ || num_released_ == 0;
  };
  const absl::MutexLock lock(&mutex_, absl::Condition(&is_decided));
  if (bytes > bytes_max_ - bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the regions of all clients have ", HumanBytes(bytes_), "; ",
                     HumanBytes(bytes), " more would exceed --shared-memory-bytes ",
                     HumanBytes(bytes_max_), ": close some regions, or try again later"));
  }
  bytes_ += bytes;
  return absl::OkStatus();
}

void RegionReaper::GiveBack(int64_t bytes) {
  const absl::MutexLock lock(&mutex_);
  bytes_ -= bytes;
}

std::shared_ptr<const Region> RegionReaper::Hold(std::shared_ptr<RegionReaper> reaper,
                                                 RegionMemory memory) {
  RegionReaper& counting = *reaper;
  const auto bytes = static_cast<int64_t>(memory.bytes().size());
  std::shared_ptr<const Region> region(
      new Region(std::move(memory)),
      [reaper = std::move(reaper)](Region* unused) { reaper->Release(unused); });
  const absl::MutexLock lock(&counting.mutex_);
  ++counting.num_mapped_;
  counting.mapped_bytes_ += bytes;
  counting.metrics_.SetShmRegions(counting.num_mapped_, counting.mapped_bytes_);
  return region;
}

void RegionReaper::Release(Region* region) {
  {
    const absl::MutexLock lock(&mutex_);
    ++num_released_;
    if (!is_stopping_) {
      region->next = std::exchange(waiting_, region);
      return;
    }
  }
  Unmap(region);
}

void RegionReaper::Unmap(Region* region) {
  const auto bytes = static_cast<int64_t>(region->memory.bytes().size());
  delete region;
  const absl::MutexLock lock(&mutex_);
  --num_released_;
  bytes_ -= bytes;
  mapped_bytes_ -= bytes;
  --num_mapped_;
  metrics_.SetShmRegions(num_mapped_, mapped_bytes_);
}

void RegionReaper::Run() {
  const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_stopping_ || waiting_ != nullptr;
  };
  const absl::MutexLock lock(&mutex_);
  while (true) {
    mutex_.Await(absl::Condition(&has_work));
    if (waiting_ == nullptr) return;
    Region* region = std::exchange(waiting_, nullptr);
    mutex_.Unlock();
    while (region != nullptr) Unmap(std::exchange(region, region->next));
    mutex_.Lock();
  }
}

void RegionReaper::Stop() {
  {
    const absl::MutexLock lock(&mutex_);
    is_stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace logprobd
