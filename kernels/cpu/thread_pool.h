#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace logprobd::kernels {

/// Threads that run one loop at a time.
class LoopThreads {
 public:
  LoopThreads() = default;
  LoopThreads(const LoopThreads&) = delete;
  LoopThreads& operator=(const LoopThreads&) = delete;
  virtual ~LoopThreads() = default;

  /// Returns the number of threads, >= 1, including the calling thread.
  virtual int32_t num_threads() const = 0;

  /// Calls `body(unit, worker)` once for every unit in [0, num_units) and returns when all calls
  /// have returned. Each running call has another worker in [0, num_threads). Not thread-safe:
  /// calls must not overlap. `body` must not throw.
  virtual void ForEach(int64_t num_units,
                       const std::function<void(int64_t unit, int32_t worker)>& body) = 0;
};

/// A fixed set of own threads; the calling thread takes part in the loop. Units are assigned in
/// order to the next free worker.
class ThreadPool final : public LoopThreads {
 public:
  /// Starts `num_threads` - 1 threads; `num_threads` >= 1 includes the calling thread. Throws
  /// std::system_error if the system cannot start all of them; in that case none is left running.
  explicit ThreadPool(int32_t num_threads);
  ~ThreadPool() override;

  int32_t num_threads() const override { return static_cast<int32_t>(threads_.size()) + 1; }

  void ForEach(int64_t num_units,
               const std::function<void(int64_t unit, int32_t worker)>& body) override;

 private:
  struct Loop;
  void Work(int32_t worker);
  /// Ends and joins the threads.
  void Stop();

  std::mutex mutex_;
  std::condition_variable started_;
  std::condition_variable finished_;
  Loop* loop_ = nullptr;    // The running loop, guarded by mutex_.
  uint64_t num_loops_ = 0;  // Loops started so far, guarded by mutex_.
  int32_t busy_ = 0;        // Threads in the loop, guarded by mutex_.
  bool stopping_ = false;   // Guarded by mutex_.
  std::vector<std::thread> threads_;
};

}  // namespace logprobd::kernels
