#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "absl/status/statusor.h"
#include "server/base/errors.h"
#include "server/engine/cuda_resources.h"

namespace logprobd::testing {

/// Work that can be enqueued on a stream, again and again.
using Work = std::function<absl::Status(cudaStream_t)>;

class Timer {
 public:
  static absl::StatusOr<Timer> Create() {
    Timer timer;
    LOGPROBD_ASSIGN_OR_RETURN(timer.stream_, CreateStream());
    LOGPROBD_ASSIGN_OR_RETURN(timer.begin_, CreateEvent());
    LOGPROBD_ASSIGN_OR_RETURN(timer.end_, CreateEvent());
    return timer;
  }

  cudaStream_t stream() const { return stream_.get(); }

  /// Milliseconds of one run, averaged over `repeats`.
  absl::StatusOr<double> Milliseconds(const Work& work, int repeats) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(begin_.get(), stream_.get()));
    for (int i = 0; i < repeats; ++i) LOGPROBD_RETURN_IF_ERROR(work(stream_.get()));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(end_.get(), stream_.get()));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(end_.get()));
    float milliseconds = 0;
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&milliseconds, begin_.get(), end_.get()));
    return static_cast<double>(milliseconds) / repeats;
  }

 private:
  CudaStream stream_;
  CudaEvent begin_;
  CudaEvent end_;
};

}  // namespace logprobd::testing
