#include "server/engine/cuda_status.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

std::string Message(absl::string_view error, absl::string_view call, absl::string_view file,
                    int line) {
  const size_t folder = file.rfind('/');
  if (folder != absl::string_view::npos) file.remove_prefix(folder + 1);
  return absl::StrCat(error, " (", call, ", ", file, ":", line, ")");
}

}  // namespace

absl::Status CudaStatus(cudaError_t error, absl::string_view call, absl::string_view file,
                        int line) {
  const std::string text = absl::StrCat("CUDA error ", static_cast<int>(error), " ",
                                        cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  const std::string message = Message(text, call, file, line);
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(message)
                                            : absl::InternalError(message);
}

absl::Status CudaStatus(cublasStatus_t error, absl::string_view call, absl::string_view file,
                        int line) {
  const std::string text = absl::StrCat("cuBLASLt error ", cublasLtGetStatusName(error), ": ",
                                        cublasLtGetStatusString(error));
  const std::string message = Message(text, call, file, line);
  return error == CUBLAS_STATUS_ALLOC_FAILED ? absl::ResourceExhaustedError(message)
                                             : absl::InternalError(message);
}

}  // namespace logprobd
