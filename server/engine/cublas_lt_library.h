#pragma once

#include "absl/status/status.h"

namespace logprobd {

/// Loads cuBLASLt at the first call and keeps it loaded. The functions of cublasLt.h that this
/// program calls do the same and forward to the library; without it they return
/// CUBLAS_STATUS_NOT_INITIALIZED. Returns FAILED_PRECONDITION if the library cannot be used; the
/// message says what to install.
absl::Status LoadCublasLt();

}  // namespace logprobd
