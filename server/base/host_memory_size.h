#pragma once

#include <cstdint>
#include <string>

namespace logprobd {

/// Memory of the host that this process can have, in bytes; 0 where the system does not say.
struct HostMemorySize {
  int64_t total_bytes = 0;      ///< Of the machine, or the limit of the control group.
  int64_t available_bytes = 0;  ///< Of it, what others leave without swapping.
};

/// From /proc/meminfo and, below that, the control group (version 2). `root`: where to find them.
HostMemorySize ReadHostMemorySize(const std::string& root = "");

}  // namespace logprobd
