#pragma once

#include <cuda_runtime_api.h>

namespace logprobd::testing {

/// Breaks the process's CUDA context for good, as a fault in any kernel would: every later call
/// fails.
cudaError_t BreakContext();

}  // namespace logprobd::testing
