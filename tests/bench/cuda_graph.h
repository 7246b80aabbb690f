#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/bench/gpu_bench.h"

namespace logprobd::testing {

/// Work that replays a CUDA graph of several calls, and so does not need the host.
class CudaGraph {
 public:
  /// Captures `calls` calls of `work` on `stream`, whose kernels must be loaded already.
  static absl::StatusOr<std::unique_ptr<CudaGraph>> Create(const Work& work, int calls,
                                                           cudaStream_t stream);
  ~CudaGraph() { (void)cudaGraphExecDestroy(executable_); }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  absl::Status Run(cudaStream_t stream) const;

 private:
  CudaGraph() = default;

  cudaGraphExec_t executable_ = nullptr;
};

/// Returns the names of the kernels that one call of `work` launches, joined by " + ". They are the
/// driver's names, which are mangled for kernels in C++. Requires a driver of CUDA 12.3 or later.
absl::StatusOr<std::string> KernelNames(const Work& work, cudaStream_t stream);

}  // namespace logprobd::testing
