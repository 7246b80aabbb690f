#include "kernels/cpu/thread_pool.h"

#include <atomic>

namespace logprobd::kernels {

struct ThreadPool::Loop {
  int64_t num_units;
  const std::function<void(int64_t, int32_t)>& body;
  std::atomic<int64_t> next{0};

  void Run(int32_t worker) {
    for (int64_t unit = next.fetch_add(1, std::memory_order_relaxed); unit < num_units;
         unit = next.fetch_add(1, std::memory_order_relaxed)) {
      body(unit, worker);
    }
  }
};

ThreadPool::ThreadPool(int32_t num_threads) {
  try {
    for (int32_t worker = 1; worker < num_threads; ++worker) {
      threads_.emplace_back([this, worker] { Work(worker); });
    }
  } catch (...) {
    // The system cannot start more threads. The running ones must end before threads_ is destroyed.
    Stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { Stop(); }

void ThreadPool::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  started_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::ForEach(int64_t num_units, const std::function<void(int64_t, int32_t)>& body) {
  Loop loop{num_units, body};
  if (num_units <= 1 || threads_.empty()) {
    loop.Run(0);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    loop_ = &loop;
    ++num_loops_;
  }
  started_.notify_all();
  loop.Run(0);
  std::unique_lock lock(mutex_);
  // Threads that wake only now find no loop and go back to sleep.
  loop_ = nullptr;
  finished_.wait(lock, [this] { return busy_ == 0; });
}

void ThreadPool::Work(int32_t worker) {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    started_.wait(lock, [&] { return stopping_ || (loop_ != nullptr && num_loops_ != seen); });
    if (stopping_) return;
    seen = num_loops_;
    Loop* loop = loop_;
    ++busy_;
    lock.unlock();
    loop->Run(worker);
    lock.lock();
    if (--busy_ == 0) finished_.notify_one();
  }
}

}  // namespace logprobd::kernels
