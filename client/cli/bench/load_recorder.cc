#include "client/cli/bench/load_recorder.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace logprobd::client {

LoadRecorder::Part& LoadRecorder::OwnPart() {
  static std::atomic<size_t> threads{0};
  thread_local const size_t number = threads.fetch_add(1, std::memory_order_relaxed);
  return parts_[number % kParts];
}

SizeStats& LoadRecorder::StatsOf(Part& part, size_t size) {
  if (part.found.sizes.empty()) part.found.sizes.resize(num_sizes_);
  return part.found.sizes[size];
}

void LoadRecorder::RecordAnswer(size_t size, int64_t rows, double seconds, Transport transport) {
  Part& part = OwnPart();
  absl::MutexLock lock(&part.mutex);
  SizeStats& stats = StatsOf(part, size);
  stats.rows += rows;
  stats.latency.Record(seconds);
  ++stats.transports[transport];
}

void LoadRecorder::RecordFailure(size_t size, const absl::Status& status) {
  Part& part = OwnPart();
  absl::MutexLock lock(&part.mutex);
  ++StatsOf(part, size).errors;
  part.found.first_error.Update(status);
}

void LoadRecorder::RecordLate(double seconds, bool by_server) {
  Part& part = OwnPart();
  absl::MutexLock lock(&part.mutex);
  LateSends& late = part.found.late;
  ++(by_server ? late.by_server : late.by_generator);
  double& most = by_server ? late.server_seconds_max : late.generator_seconds_max;
  most = std::max(most, seconds);
}

void LoadRecorder::RecordUnsent(int64_t count) {
  Part& part = OwnPart();
  absl::MutexLock lock(&part.mutex);
  part.found.late.unsent += count;
}

Interval LoadRecorder::Take() {
  Interval all;
  all.sizes.resize(num_sizes_);
  for (Part& part : parts_) {
    absl::MutexLock lock(&part.mutex);
    all.Append(std::exchange(part.found, {}));
  }
  return all;
}

}  // namespace logprobd::client
