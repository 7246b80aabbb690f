#include "server/engine/rendezvous.h"

#include <thread>

namespace logprobd {
namespace {

/// Looks before a thread sleeps: shards arrive within microseconds of each other.
constexpr int kLooks = 200;

}  // namespace

bool Rendezvous::Meet() {
  const uint32_t round = round_.load(std::memory_order_acquire);
  if (is_broken_.load(std::memory_order_acquire)) return false;
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_acq_rel);
    round_.notify_all();
  } else {
    for (int look = 0; look < kLooks && round_.load(std::memory_order_acquire) == round; ++look) {
      std::this_thread::yield();
    }
    round_.wait(round, std::memory_order_acquire);
  }
  return !is_broken_.load(std::memory_order_acquire);
}

void Rendezvous::Break() {
  is_broken_.store(true, std::memory_order_release);
  round_.fetch_add(1, std::memory_order_acq_rel);
  round_.notify_all();
}

}  // namespace logprobd
