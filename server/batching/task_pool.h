#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace logprobd {

/// Threads that share the tasks of one caller at a time and sleep in between.
class TaskPool {
 public:
  /// Starts `num_threads` >= 0 threads named `name`. The caller of Run always runs tasks as well.
  /// If the system cannot start all threads, the pool uses those that it got and logs a warning.
  TaskPool(const char* name, int32_t num_threads);
  ~TaskPool();
  TaskPool(const TaskPool&) = delete;
  TaskPool& operator=(const TaskPool&) = delete;

  /// Calls `task(i)` for every i in [0, num_tasks), in any order and on any of the threads. Returns
  /// when all calls have returned. May be called from one thread at a time.
  void Run(int64_t num_tasks, absl::FunctionRef<void(int64_t)> task);

 private:
  using Task = absl::FunctionRef<void(int64_t)>;

  void Work();
  /// Runs tasks until none is left. The mutex is held on entry and exit, but not while a task runs.
  void TakeTasks() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Mutex mutex_;
  const Task* task_ ABSL_GUARDED_BY(mutex_) = nullptr;
  int64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t end_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t running_ ABSL_GUARDED_BY(mutex_) = 0;
  bool has_work_ ABSL_GUARDED_BY(mutex_) = false;  // Tasks are left, or the pool is stopping.
  bool is_done_ ABSL_GUARDED_BY(mutex_) = true;    // Every task has returned.
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace logprobd
