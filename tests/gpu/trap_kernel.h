#pragma once

#include <cuda_runtime_api.h>

namespace logprobd::testing {

/// Breaks the CUDA context of the process, as a fault in a kernel does: every later call fails.
cudaError_t BreakContext();

}  // namespace logprobd::testing
