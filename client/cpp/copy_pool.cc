#include "client/cpp/copy_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/synchronization/blocking_counter.h"

namespace logprobd::client {
namespace {

// Handing a part over costs some microseconds, copying it about 50.
constexpr size_t kPartBytes = size_t{512} << 10;

}  // namespace

/// A copy, taken part by part by whoever has time.
struct CopyPool::Job {
  Job(absl::Span<const std::byte> source, absl::Span<std::byte> target)
      : from(source),
        to(target),
        parts((source.size() + kPartBytes - 1) / kPartBytes),
        left(static_cast<int>(parts)) {}

  /// Copies parts until none is left to be begun.
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
    absl::MutexLock lock(&mutex_);
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
    absl::MutexLock lock(&mutex_);
    if (threads_.empty()) StartThreads();
    jobs_.push_back(job);
  }
  job->Help();
  {
    absl::MutexLock lock(&mutex_);
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
      absl::MutexLock lock(&mutex_);
      const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return is_stopping_ || !jobs_.empty();
      };
      mutex_.Await(absl::Condition(&has_work));
      if (jobs_.empty()) return;
      job = jobs_.front();
      // Whose parts are all begun needs no further help.
      if (job->next.load() >= job->parts) {
        jobs_.pop_front();
        continue;
      }
    }
    job->Help();
  }
}

}  // namespace logprobd::client
