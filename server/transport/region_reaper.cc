#include "server/transport/region_reaper.h"

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/base/human_bytes.h"
#include "server/base/start_thread.h"

namespace logprobd {

absl::StatusOr<std::shared_ptr<RegionReaper>> RegionReaper::Create(int64_t bytes_max,
                                                                   Metrics& metrics) {
  std::shared_ptr<RegionReaper> reaper(new RegionReaper(bytes_max, metrics));
  LOGPROBD_ASSIGN_OR_RETURN(reaper->thread_,
                            StartThread("local-unmap", [self = reaper.get()] { self->Run(); }));
  return reaper;
}

absl::Status RegionReaper::Take(int64_t bytes) {
  const auto is_decided = [this, bytes]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return bytes <= bytes_max_ - bytes_ || num_buried_ == 0;
  };
  const absl::MutexLock lock(&mutex_, absl::Condition(&is_decided));
  if (bytes > bytes_max_ - bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("regions of all clients have ", HumanBytes(bytes_), ", with ",
                     HumanBytes(bytes), " more they would pass --shared-memory-bytes ",
                     HumanBytes(bytes_max_), ": close some, or try later"));
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
      [reaper = std::move(reaper)](Region* unheld) { reaper->Bury(unheld); });
  const absl::MutexLock lock(&counting.mutex_);
  ++counting.num_mapped_;
  counting.mapped_bytes_ += bytes;
  counting.metrics_.SetShmRegions(counting.num_mapped_, counting.mapped_bytes_);
  return region;
}

void RegionReaper::Bury(Region* region) {
  {
    const absl::MutexLock lock(&mutex_);
    ++num_buried_;
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
  --num_buried_;
  bytes_ -= bytes;
  mapped_bytes_ -= bytes;
  --num_mapped_;
  metrics_.SetShmRegions(num_mapped_, mapped_bytes_);
}

void RegionReaper::Run() {
  const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_stopping_ || waiting_ != nullptr;
  };
  absl::MutexLock lock(&mutex_);
  while (true) {
    mutex_.Await(absl::Condition(&has_work));
    if (waiting_ == nullptr) {
      return;
    }
    Region* region = std::exchange(waiting_, nullptr);
    mutex_.Unlock();
    while (region != nullptr) {
      Unmap(std::exchange(region, region->next));
    }
    mutex_.Lock();
  }
}

void RegionReaper::Stop() {
  {
    const absl::MutexLock lock(&mutex_);
    is_stopping_ = true;
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

}  // namespace logprobd
