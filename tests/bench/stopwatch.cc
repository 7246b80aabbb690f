#include "tests/bench/stopwatch.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <random>
#include <utility>

#include "server/base/errors.h"
#include "tests/bench/bench_kernels.h"

namespace logprobd::testing {
namespace {

constexpr double kTimedMillisecondsMin = 50;
constexpr double kEnergyMillisecondsMin = 500;
constexpr double kBurstMilliseconds = 2;
constexpr int kRestMicroseconds = 25'000;
constexpr int kBursts = 4;  // bursts per round, since a single burst is short and noisy

/// Returns how many calls take a time, and at least 1.
int CallsIn(double milliseconds, double of_one_call) {
  return std::max(1, static_cast<int>(milliseconds / of_one_call));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Stopwatch>> Stopwatch::Create(double settle_milliseconds) {
  std::unique_ptr<Stopwatch> watch(new Stopwatch(settle_milliseconds));
  LOGPROBD_ASSIGN_OR_RETURN(watch->timer_, Timer::Create());
  LOGPROBD_ASSIGN_OR_RETURN(watch->clock_, AllocateDevice(sizeof(float), "the clock"));
  return watch;
}

absl::StatusOr<std::map<std::string, Times>> Stopwatch::Measure(
    const std::map<std::string, Work>& works, int rounds) {
  std::vector<std::string> order;
  for (const auto& [name, work] : works) order.push_back(name);
  std::map<std::string, Times> times;
  std::mt19937 random(1);
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (const std::string& name : order) {
      LOGPROBD_RETURN_IF_ERROR(MeasureOnce(works.at(name), times[name]));
    }
  }
  return times;
}

absl::StatusOr<double> Stopwatch::Settled(const Work& work, double milliseconds) {
  // Calls become slower as the clock falls, or faster than the first one, so the time is summed.
  for (double elapsed = 0; elapsed < settle_milliseconds_;) {
    const int calls = CallsIn(settle_milliseconds_ - elapsed, milliseconds);
    LOGPROBD_ASSIGN_OR_RETURN(milliseconds, timer_.Milliseconds(work, calls));
    elapsed += calls * milliseconds;
  }
  return milliseconds;
}

absl::StatusOr<double> Stopwatch::ClockAfter(const Work& work, int calls) {
  // The clock is read directly after the work, since it rises within microseconds of rest.
  for (int i = 0; i < calls; ++i) LOGPROBD_RETURN_IF_ERROR(work(timer_.stream()));
  float megahertz = 0;
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      LaunchReadClock(reinterpret_cast<float*>(clock_.get()), timer_.stream()));
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(timer_.stream()));
  LOGPROBD_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(&megahertz, clock_.get(), sizeof(megahertz), cudaMemcpyDeviceToHost));
  return megahertz;
}

absl::Status Stopwatch::MeasureOnce(const Work& work, Times& times) {
  LOGPROBD_RETURN_IF_ERROR(timer_.Milliseconds(work, 1).status());
  LOGPROBD_ASSIGN_OR_RETURN(const double rested, timer_.Milliseconds(work, 1));
  const int burst_calls = CallsIn(kBurstMilliseconds, rested);
  LOGPROBD_ASSIGN_OR_RETURN(const double warm, Settled(work, rested));
  const double timed_milliseconds = std::max(settle_milliseconds_ / 2, kTimedMillisecondsMin);
  const bool measures_energy = timed_milliseconds >= kEnergyMillisecondsMin;
  if (measures_energy) energy_meter_.Start();
  LOGPROBD_ASSIGN_OR_RETURN(const double settled,
                            timer_.Milliseconds(work, CallsIn(timed_milliseconds, warm)));
  times.settled.push_back(settled);
  LOGPROBD_ASSIGN_OR_RETURN(const double megahertz, ClockAfter(work, burst_calls));
  times.megahertz.push_back(megahertz);
  // The meter stops after the clock was read, since the GPU rests while its thread ends.
  const std::optional<double> watts = measures_energy ? energy_meter_.Stop() : std::nullopt;
  if (watts.has_value()) {
    times.watts.push_back(*watts);
    times.joules.push_back(*watts * settled / 1e3);
  }
  for (int i = 0; i < kBursts; ++i) {
    usleep(kRestMicroseconds);
    LOGPROBD_ASSIGN_OR_RETURN(const double burst, timer_.Milliseconds(work, burst_calls));
    times.burst.push_back(burst);
  }
  return absl::OkStatus();
}

}  // namespace logprobd::testing
