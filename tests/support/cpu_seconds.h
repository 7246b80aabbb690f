#pragma once

#include <poll.h>

#include <ctime>

#include "absl/time/time.h"

namespace logprobd::testing {

/// Returns the CPU time, in seconds, that the process uses within `period`. The caller sleeps
/// meanwhile, so that a loop of the code under test that does not wait uses most of the period.
inline double CpuSecondsWithin(absl::Duration period) {
  const auto cpu_seconds = [] {
    timespec used = {};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return absl::ToDoubleSeconds(absl::DurationFromTimespec(used));
  };
  const double before = cpu_seconds();
  poll(nullptr, 0, static_cast<int>(absl::ToInt64Milliseconds(period)));
  return cpu_seconds() - before;
}

inline constexpr absl::Duration kIdlePeriod = absl::Milliseconds(500);
/// A loop that waits uses less than a millisecond of kIdlePeriod. One that does not gets more than
/// this also on a machine that is ten times overloaded.
inline constexpr double kIdleCpuSecondsMax = 0.02;

}  // namespace logprobd::testing
