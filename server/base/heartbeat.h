#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace logprobd {

/// The sign of life of one thread: whether it has work in hand, and a count that rises when the
/// work moves. A thread that has work and whose count stays the same stands still; it may be in a
/// call that never returns. Nothing here reads a clock, takes a lock or allocates.
///
/// Thread-safe. Threads that help the thread with its work may call Beat. Another thread may call
/// End once nobody waits for the work any more.
class Heartbeat {
 public:
  struct Owner {
    std::string thread;    ///< Name of the thread.
    std::string head;      ///< Empty if the thread works for the whole server.
    int32_t replica = -1;  ///< -1 if the thread works for all replicas of the head.
  };

  Heartbeat() : Heartbeat(Owner{}) {}
  explicit Heartbeat(Owner owner) : owner_(std::move(owner)) {}

  /// The thread has work in hand, from now on for `shard`, or for no shard in particular if -1. May
  /// also be called by the thread that hands over the work.
  void Begin(int32_t shard = -1) {
    shard_.store(shard, std::memory_order_relaxed);
    Beat();
    is_at_work_.store(true, std::memory_order_release);
  }
  /// The work has moved.
  void Beat() { beats_.fetch_add(1, std::memory_order_relaxed); }
  /// The thread has no work in hand, for example because it waits for some.
  void End() { is_at_work_.store(false, std::memory_order_release); }

  const Owner& owner() const { return owner_; }
  bool is_at_work() const { return is_at_work_.load(std::memory_order_acquire); }
  int64_t beats() const { return beats_.load(std::memory_order_relaxed); }
  int32_t shard() const { return shard_.load(std::memory_order_relaxed); }

 private:
  const Owner owner_;
  std::atomic<int64_t> beats_ = 0;
  std::atomic<int32_t> shard_ = -1;
  std::atomic<bool> is_at_work_ = false;
};

/// The heartbeats of a process. Thread-safe.
class Heartbeats {
 public:
  /// Adds a heartbeat, which leaves the table when its owner releases it.
  std::shared_ptr<Heartbeat> Add(Heartbeat::Owner owner);

  std::vector<std::shared_ptr<const Heartbeat>> All() const;

 private:
  mutable absl::Mutex mutex_;
  std::vector<std::weak_ptr<const Heartbeat>> all_ ABSL_GUARDED_BY(mutex_);
};

/// Adds a heartbeat to `table`, or makes one that nobody looks at if `table` is null.
std::shared_ptr<Heartbeat> AddHeartbeat(Heartbeats* table, Heartbeat::Owner owner);

}  // namespace logprobd
