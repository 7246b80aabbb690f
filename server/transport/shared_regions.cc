#include "server/transport/shared_regions.h"

#include <sys/random.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/base/text.h"

namespace logprobd {
namespace {

absl::StatusOr<RandomId> MakeRandomId() {
  RandomId id;
  // For so few bytes, getrandom always returns all of them in one call.
  if (getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) {
    return absl::InternalError("getrandom returned no random numbers");
  }
  return id;
}

SharedRegions::Options Effective(SharedRegions::Options options) {
  options.lease_bytes_max = std::min(options.lease_bytes_max, options.bytes_max);
  options.region_bytes_max = std::min(options.region_bytes_max, options.lease_bytes_max);
  return options;
}

absl::Status NoSuchRegion() {
  return absl::NotFoundError(
      "shared_memory.region: no such region; it was closed, or its lease has ended");
}

absl::Status LeaseEnded() { return absl::NotFoundError("the lease has ended"); }

}  // namespace

absl::StatusOr<std::unique_ptr<SharedRegions>> SharedRegions::Create(const Options& options,
                                                                     HostPinning& pinning,
                                                                     Metrics& metrics) {
  LOGPROBD_ASSIGN_OR_RETURN(std::shared_ptr<RegionReaper> reaper,
                            RegionReaper::Create(options.bytes_max, metrics));
  return std::unique_ptr<SharedRegions>(
      new SharedRegions(Effective(options), pinning, std::move(reaper)));
}

SharedRegions::SharedRegions(const Options& options, HostPinning& pinning,
                             std::shared_ptr<RegionReaper> reaper)
    : options_(options), pinning_(pinning), reaper_(std::move(reaper)), stopper_(reaper_) {}

absl::StatusOr<RandomId> SharedRegions::OpenLease() {
  LOGPROBD_ASSIGN_OR_RETURN(const RandomId id, MakeRandomId());
  const absl::MutexLock lock(&mutex_);
  leases_.emplace(id, Lease());
  return id;
}

void SharedRegions::CloseLease(const RandomId& lease) {
  std::vector<std::shared_ptr<const Region>> closed;  // released outside the lock
  const absl::MutexLock lock(&mutex_);
  leases_.erase(lease);
  for (auto entry = regions_.begin(); entry != regions_.end();) {
    const auto next = std::next(entry);
    if (entry->second.lease == lease) {
      closed.push_back(std::move(entry->second.region));
      regions_.erase(entry);
    }
    entry = next;
  }
}

bool SharedRegions::HasLease(const RandomId& lease) const {
  const absl::ReaderMutexLock lock(&mutex_);
  return leases_.contains(lease);
}

absl::Status SharedRegions::TakeFromLease(const RandomId& lease, int64_t bytes) {
  const absl::MutexLock lock(&mutex_);
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return LeaseEnded();
  Lease& taken = found->second;
  if (taken.num_regions >= options_.lease_regions_max) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "a lease may have at most ", options_.lease_regions_max, " regions: close some first"));
  }
  if (bytes > options_.lease_bytes_max - taken.bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the regions of this lease have ", HumanBytes(taken.bytes), "; ",
                     HumanBytes(bytes), " more would exceed its limit of ",
                     HumanBytes(options_.lease_bytes_max), ": close some first"));
  }
  taken.bytes += bytes;
  ++taken.num_regions;
  return absl::OkStatus();
}

void SharedRegions::GiveBackToLease(const RandomId& lease, int64_t bytes) {
  const absl::MutexLock lock(&mutex_);
  GiveBackToLeaseLocked(lease, bytes);
}

void SharedRegions::GiveBackToLeaseLocked(const RandomId& lease, int64_t bytes) {
  const auto found = leases_.find(lease);
  if (found != leases_.end()) {
    found->second.bytes -= bytes;
    --found->second.num_regions;
  }
}

absl::StatusOr<SharedRegions::Created> SharedRegions::CreateRegion(const RandomId& lease,
                                                                   uint64_t bytes) {
  if (!is_on()) {
    return absl::FailedPreconditionError(
        "shared memory is switched off on this server (--shared-memory-bytes 0)");
  }
  if (bytes == 0 || bytes > static_cast<uint64_t>(options_.region_bytes_max)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "create_region.bytes: ", bytes, ", must be in [1, ", options_.region_bytes_max, "]"));
  }
  const int64_t rounded = RegionMemory::RoundUp(static_cast<int64_t>(bytes));
  LOGPROBD_ASSIGN_OR_RETURN(const RandomId id, MakeRandomId());
  LOGPROBD_RETURN_IF_ERROR(TakeFromLease(lease, rounded));
  if (absl::Status status = reaper_->Take(rounded); !status.ok()) {
    GiveBackToLease(lease, rounded);
    return status;
  }
  absl::StatusOr<RegionMemory> memory = RegionMemory::Create(rounded, pinning_);
  if (!memory.ok()) {
    reaper_->GiveBack(rounded);
    GiveBackToLease(lease, rounded);
    return memory.status();
  }
  Created created{.id = id, .bytes = rounded, .file = memory->TakeFile()};
  Entry entry{.region = RegionReaper::Hold(reaper_, *std::move(memory)), .lease = lease};
  const absl::MutexLock lock(&mutex_);
  if (!leases_.contains(lease)) {
    return LeaseEnded();  // the lease ended meanwhile; `entry` frees the memory
  }
  regions_.emplace(id, std::move(entry));
  return created;
}

absl::Status SharedRegions::CloseRegion(const RandomId& lease, const RandomId& region) {
  Entry closed;  // released outside the lock
  const absl::MutexLock lock(&mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end() || found->second.lease != lease) return NoSuchRegion();
  closed = std::move(found->second);
  regions_.erase(found);
  GiveBackToLeaseLocked(lease, static_cast<int64_t>(closed.region->memory.bytes().size()));
  return absl::OkStatus();
}

absl::StatusOr<HiddenPayload> SharedRegions::Find(const SharedMemorySlice& slice) const {
  std::shared_ptr<const Region> region;
  {
    const absl::ReaderMutexLock lock(&mutex_);
    const auto found = regions_.find(slice.region);
    if (found == regions_.end()) return NoSuchRegion();
    region = found->second.region;
  }
  const absl::Span<const std::byte> bytes = region->memory.bytes();
  const auto region_bytes = static_cast<int64_t>(bytes.size());
  if (slice.offset > region_bytes || slice.bytes > region_bytes - slice.offset) {
    return absl::InvalidArgumentError(
        absl::StrCat("shared_memory: ", slice.bytes, " bytes from offset ", slice.offset,
                     ", must end within the region of ", region_bytes, " bytes"));
  }
  HiddenPayload payload;
  payload.pieces = {
      bytes.subspan(static_cast<size_t>(slice.offset), static_cast<size_t>(slice.bytes))};
  payload.bytes = slice.bytes;
  payload.place = PayloadPlace::kSharedMemory;
  payload.is_pinned = region->memory.is_pinned();
  payload.owner = std::const_pointer_cast<Region>(std::move(region));
  return payload;
}

}  // namespace logprobd
