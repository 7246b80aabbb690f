#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// A failed CUDA runtime call as a Status: RESOURCE_EXHAUSTED for memory, else INTERNAL, with call,
/// error and place.
absl::Status CudaStatus(cudaError_t error, absl::string_view call, absl::string_view file,
                        int line);

/// Likewise for cuBLASLt.
absl::Status CudaStatus(cublasStatus_t error, absl::string_view call, absl::string_view file,
                        int line);

namespace internal {
constexpr bool IsCudaSuccess(cudaError_t error) { return error == cudaSuccess; }
constexpr bool IsCudaSuccess(cublasStatus_t error) { return error == CUBLAS_STATUS_SUCCESS; }
}  // namespace internal

}  // namespace logprobd

/// Returns from the function (Status or StatusOr) when a CUDA runtime or cuBLASLt call fails.
#define LOGPROBD_RETURN_IF_CUDA_ERROR(call)                                 \
  do {                                                                      \
    const auto cuda_error = (call);                                         \
    if (!::logprobd::internal::IsCudaSuccess(cuda_error)) {                 \
      return ::logprobd::CudaStatus(cuda_error, #call, __FILE__, __LINE__); \
    }                                                                       \
  } while (false)
