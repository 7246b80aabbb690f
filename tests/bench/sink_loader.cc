#include "tests/bench/sink_loader.h"

#include <cstdint>
#include <ctime>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/errors.h"

namespace logprobd::testing {
namespace {

double ClientCpuSeconds() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

class Loader {
 public:
  Loader(Sink& sink, const ServerChild& server, const SinkLoad& load)
      : sink_(sink), server_(server), load_(load), room_(load.in_flight) {}

  absl::StatusOr<SinkRate> Run() {
    std::vector<std::thread> senders;
    for (int i = 0; i < load_.senders; ++i) senders.emplace_back([this] { SendUntilStopped(); });
    AwaitFailure(load_.seconds / 3);
    const Reading before = Read();
    AwaitFailure(load_.seconds);
    const Reading after = Read();
    {
      absl::MutexLock lock(&mutex_);
      is_stopping_ = true;
    }
    for (std::thread& sender : senders) sender.join();
    absl::MutexLock lock(&mutex_);
    const auto is_idle = [this] { return room_ == load_.in_flight; };
    mutex_.Await(absl::Condition(&is_idle));
    LOGPROBD_RETURN_IF_ERROR(failure_);
    const double gigabytes =
        static_cast<double>((after.messages - before.messages) * kSinkHiddenBytes) * 1e-9;
    if (gigabytes == 0) return absl::DeadlineExceededError("no message was answered in time");
    return SinkRate{gigabytes / absl::ToDoubleSeconds(after.time - before.time),
                    (after.server_cpu - before.server_cpu) / gigabytes,
                    (after.client_cpu - before.client_cpu) / gigabytes};
  }

 private:
  struct Reading {
    absl::Time time;
    int64_t messages;
    double server_cpu;
    double client_cpu;
  };

  void SendUntilStopped() {
    while (true) {
      {
        absl::MutexLock lock(&mutex_);
        const auto may_go_on = [this] { return room_ > 0 || is_stopping_; };
        mutex_.Await(absl::Condition(&may_go_on));
        if (is_stopping_) return;
        --room_;
      }
      sink_.Send([this](const absl::Status& status) {
        absl::MutexLock lock(&mutex_);
        ++room_;
        messages_ += status.ok() ? 1 : 0;
        failure_.Update(status);
        is_stopping_ |= !status.ok();
      });
    }
  }

  /// Returns after `seconds`, or at the first failure.
  void AwaitFailure(double seconds) {
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(absl::Condition(&is_stopping_), absl::Seconds(seconds));
  }

  Reading Read() {
    absl::MutexLock lock(&mutex_);
    return {absl::Now(), messages_, server_.CpuSeconds(), ClientCpuSeconds()};
  }

  Sink& sink_;
  const ServerChild& server_;
  const SinkLoad load_;
  absl::Mutex mutex_;
  int room_ ABSL_GUARDED_BY(mutex_);  // messages that may be sent now
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t messages_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<SinkRate> LoadSink(Sink& sink, const ServerChild& server, const SinkLoad& load) {
  return Loader(sink, server, load).Run();
}

}  // namespace logprobd::testing
