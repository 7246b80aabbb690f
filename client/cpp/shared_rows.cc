#include "client/cpp/shared_rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/time/clock.h"

namespace logprobd::client {

namespace {

// Spans are page-aligned: no two share a cache line, and devices copy whole pages fastest.
constexpr int64_t kPageBytes = 4096;
constexpr absl::Duration kAfterRefusal = absl::Seconds(1);

int64_t RoundUp(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

}  // namespace

RegionPool::RegionPool(std::shared_ptr<LocalLease> lease, int64_t region_bytes)
    : lease_(std::move(lease)),
      region_bytes_(
          RoundUp(std::max(kPageBytes, std::min(region_bytes, lease_->grant().region_bytes_max)))) {
}

absl::StatusOr<std::shared_ptr<const SharedSpan>> RegionPool::Allocate(int64_t bytes) {
  const absl::MutexLock lock(&mutex_);
  // This check comes before rounding up, because rounding could overflow.
  if (bytes > lease_->grant().lease_bytes_max) return AboveLimits(bytes);
  const int64_t rounded = RoundUp(bytes);
  // Takes the first gap that fits, so that the same memory is reused and stays in cache.
  const auto take = [&](RegionSpace& space) -> std::shared_ptr<const SharedSpan> {
    const auto gap = std::find_if(space.gaps.begin(), space.gaps.end(), [&](const Gap& candidate) {
      return candidate.end - candidate.begin >= rounded;
    });
    if (gap == space.gaps.end()) return nullptr;
    auto* const span = new SharedSpan{.region = space.region, .offset = gap->begin, .bytes = bytes};
    gap->begin += rounded;
    if (gap->begin == gap->end) space.gaps.erase(gap);
    return {span, [pool = shared_from_this()](const SharedSpan* done) {
              pool->Free(*done);
              delete done;
            }};
  };
  for (RegionSpace& space : regions_) {
    if (auto span = take(space); span != nullptr) return span;
  }
  absl::StatusOr<RegionSpace*> grown = Grow(rounded);
  if (!grown.ok()) return grown.status();
  return take(**grown);
}

absl::StatusOr<RegionPool::RegionSpace*> RegionPool::Grow(int64_t bytes) {
  if (absl::Now() < refused_until_) return refusal_;
  const LocalGrant& grant = lease_->grant();
  const int64_t held = HeldBytes();
  int64_t size = std::max(bytes, region_bytes_);
  // The lease may still have room for this span, although not for a region of the usual size.
  if (size > grant.lease_bytes_max - held) size = bytes;
  if (size > grant.region_bytes_max || size > grant.lease_bytes_max - held ||
      static_cast<int64_t>(regions_.size()) >= grant.regions_max) {
    return AboveLimits(bytes);
  }
  absl::StatusOr<std::shared_ptr<SharedRegion>> region = lease_->CreateRegion(size);
  if (!region.ok()) {
    refusal_ = region.status();
    refused_until_ = absl::Now() + kAfterRefusal;
    return refusal_;
  }
  const auto end = static_cast<int64_t>((*region)->bytes().size());
  regions_.push_back({.region = *std::move(region),
                      .gaps = {{.begin = 0, .end = end}},
                      .is_kept = size <= region_bytes_});
  return &regions_.back();
}

int64_t RegionPool::HeldBytes() const {
  int64_t held = 0;
  for (const RegionSpace& space : regions_) {
    held += static_cast<int64_t>(space.region->bytes().size());
  }
  return held;
}

absl::Status RegionPool::AboveLimits(int64_t bytes) const {
  const LocalGrant& grant = lease_->grant();
  return absl::ResourceExhaustedError(absl::StrCat(
      bytes, " more bytes exceed the server's limits on shared memory: ", grant.region_bytes_max,
      " bytes per region, ", grant.lease_bytes_max, " bytes and ", grant.regions_max,
      " regions per client; this client uses ", HeldBytes(), " bytes"));
}

void RegionPool::Free(const SharedSpan& span) {
  std::shared_ptr<SharedRegion> unused;
  {
    const absl::MutexLock lock(&mutex_);
    const auto space =
        std::find_if(regions_.begin(), regions_.end(),
                     [&](const RegionSpace& candidate) { return candidate.region == span.region; });
    Gap freed = {.begin = span.offset, .end = span.offset + RoundUp(span.bytes)};
    auto next = std::find_if(space->gaps.begin(), space->gaps.end(),
                             [&](const Gap& gap) { return gap.begin > freed.begin; });
    if (next != space->gaps.end() && next->begin == freed.end) {
      freed.end = next->end;
      next = space->gaps.erase(next);
    }
    if (next != space->gaps.begin() && (next - 1)->end == freed.begin) {
      (next - 1)->end = freed.end;
    } else {
      space->gaps.insert(next, freed);
    }
    const auto size = static_cast<int64_t>(space->region->bytes().size());
    if (space->is_kept || space->gaps.front().end - space->gaps.front().begin != size) return;
    unused = std::move(space->region);
    regions_.erase(space);
  }
  // A failure means that the lease has ended, and the region with it.
  lease_->CloseRegion(unused->id()).IgnoreError();
}

std::optional<SharedSpan> RegionPool::Find(absl::Span<const std::byte> bytes) {
  const absl::MutexLock lock(&mutex_);
  for (const RegionSpace& space : regions_) {
    const absl::Span<std::byte> memory = space.region->bytes();
    if (bytes.data() >= memory.data() &&
        bytes.data() + bytes.size() <= memory.data() + memory.size()) {
      return SharedSpan{.region = space.region,
                        .offset = bytes.data() - memory.data(),
                        .bytes = static_cast<int64_t>(bytes.size())};
    }
  }
  return std::nullopt;
}

int64_t RegionPool::num_regions() const {
  const absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(regions_.size());
}

namespace {

// Handing a part to a thread costs a few microseconds; copying it takes about 50.
constexpr size_t kPartBytes = size_t{512} << 10;

}  // namespace

/// A copy in parts; each thread takes the next part that is not started.
struct CopyPool::Job {
  Job(absl::Span<const std::byte> source, absl::Span<std::byte> target)
      : from(source),
        to(target),
        parts((source.size() + kPartBytes - 1) / kPartBytes),
        left(static_cast<int>(parts)) {}

  /// Copies parts until every part is started.
  void Help() {
    for (size_t part = next++; part < parts; part = next++) {
      const size_t begin = part * kPartBytes;
      const size_t bytes = std::min(kPartBytes, from.size() - begin);
      std::memcpy(to.data() + begin, from.data() + begin, bytes);
      left.DecrementCount();
    }
  }

  const absl::Span<const std::byte> from;
  const absl::Span<std::byte> to;
  const size_t parts;
  std::atomic<size_t> next = 0;
  absl::BlockingCounter left;
};

CopyPool::~CopyPool() {
  std::vector<std::thread> threads;
  {
    const absl::MutexLock lock(&mutex_);
    is_stopping_ = true;
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

void CopyPool::Copy(absl::Span<const std::byte> from, absl::Span<std::byte> to) {
  if (num_threads_ == 0 || from.size() < 2 * kPartBytes) {
    if (!from.empty()) std::memcpy(to.data(), from.data(), from.size());
    return;
  }
  auto job = std::make_shared<Job>(from, to);
  {
    const absl::MutexLock lock(&mutex_);
    if (threads_.empty()) StartThreads();
    jobs_.push_back(job);
  }
  job->Help();
  {
    const absl::MutexLock lock(&mutex_);
    const auto found = std::find(jobs_.begin(), jobs_.end(), job);
    if (found != jobs_.end()) jobs_.erase(found);
  }
  job->left.Wait();
}

void CopyPool::StartThreads() {
  for (int i = 0; i < num_threads_; ++i) threads_.emplace_back([this] { Work(); });
}

void CopyPool::Work() {
  while (true) {
    std::shared_ptr<Job> job;
    {
      const absl::MutexLock lock(&mutex_);
      const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return is_stopping_ || !jobs_.empty();
      };
      mutex_.Await(absl::Condition(&has_work));
      if (jobs_.empty()) return;
      job = jobs_.front();
      // A job whose parts are all started needs no more threads.
      if (job->next.load() >= job->parts) {
        jobs_.pop_front();
        continue;
      }
    }
    job->Help();
  }
}

}  // namespace logprobd::client
