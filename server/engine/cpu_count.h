#pragma once

#include <cstdint>

namespace logprobd {

/// Cores that this process may use: its CPU affinity, and below that the CPU quota of its control
/// group (version 2) rounded up. At least 1.
int32_t UsableCpuCount();

}  // namespace logprobd
