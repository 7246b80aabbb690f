#include "server/batching/task_pool.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "server/base/host.h"
#include "server/base/log.h"

namespace logprobd {

TaskPool::TaskPool(const char* name, int32_t num_threads) {
  for (int32_t i = 0; i < num_threads; ++i) {
    absl::StatusOr<std::thread> thread = StartThread(name, [this] { Work(); });
    if (!thread.ok()) {  // The pool also works with fewer threads, but more slowly.
      LogWarning("a pool has fewer threads than requested", {{"pool", name},
                                                             {"requested", num_threads},
                                                             {"started", i},
                                                             {"error", thread.status().message()}});
      break;
    }
    threads_.push_back(*std::move(thread));
  }
}

TaskPool::~TaskPool() {
  {
    const absl::MutexLock lock(&mutex_);
    stopping_ = true;
    has_work_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void TaskPool::Run(int64_t num_tasks, absl::FunctionRef<void(int64_t)> task) {
  if (num_tasks <= 1 || threads_.empty()) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i);
    return;
  }
  const absl::MutexLock lock(&mutex_);
  task_ = &task;
  next_ = 0;
  end_ = num_tasks;
  has_work_ = true;
  is_done_ = false;
  TakeTasks();
  mutex_.Await(absl::Condition(&is_done_));
  task_ = nullptr;
}

void TaskPool::Work() {
  const absl::MutexLock lock(&mutex_);
  while (!stopping_) {
    TakeTasks();
    mutex_.Await(absl::Condition(&has_work_));
  }
}

void TaskPool::TakeTasks() {
  while (next_ < end_) {
    const int64_t i = next_++;
    has_work_ = next_ < end_ || stopping_;
    ++running_;
    const Task& task = *task_;
    mutex_.Unlock();
    task(i);
    mutex_.Lock();
    --running_;
    is_done_ = running_ == 0 && next_ == end_;
  }
}

}  // namespace logprobd
