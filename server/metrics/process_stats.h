#pragma once

namespace logprobd {

/// What the kernel says of this process; a figure that cannot be read is 0.
struct ProcessStats {
  double cpu_seconds = 0;
  double resident_bytes = 0;
  double virtual_bytes = 0;
  double open_fds = 0;
  double max_fds = 0;
  double start_time_seconds = 0;  ///< Since the epoch.
};

/// Reads /proc/self. Some tens of microseconds, plus the number of open files.
ProcessStats ReadProcessStats();

}  // namespace logprobd
