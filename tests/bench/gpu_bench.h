#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "server/base/errors.h"
#include "server/engine/cuda_resources.h"

namespace logprobd::testing {

/// Returns the name of the first GPU and the properties that determine its speed, for example
/// "NVIDIA H200, 132 SMs, up to 1980 MHz, memory 3201 MHz, driver 580.82.07, CUDA 13.0". If there
/// is no GPU, returns "no GPU: " and the reason.
std::string GpuMachineName();

/// Work that can be enqueued on a stream any number of times.
using Work = std::function<absl::Status(cudaStream_t)>;

/// Measures the time of work with events on a separate stream.
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

  /// Returns the milliseconds of one run, averaged over `repeats` runs.
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
