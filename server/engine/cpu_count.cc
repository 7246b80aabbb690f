#include "server/engine/cpu_count.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <string>
#include <thread>

namespace logprobd {
namespace {

/// The quota of /sys/fs/cgroup/cpu.max ("200000 100000": 2 cores), or no limit ("max 100000").
double QuotaCores() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0;
  double period = 0;
  if (file >> quota >> period && quota > 0 && period > 0) return quota / period;
  return std::numeric_limits<double>::infinity();
}

int32_t AffinityCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int32_t>(std::thread::hardware_concurrency());  // more than 1024 CPUs
}

}  // namespace

int32_t UsableCpuCount() {
  const int32_t cores = std::max(AffinityCores(), 1);
  const double quota = std::ceil(QuotaCores());
  return quota < cores ? std::max(static_cast<int32_t>(quota), 1) : cores;
}

}  // namespace logprobd
