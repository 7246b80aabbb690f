#pragma once

// How a kernel starts while the previous kernel on its stream ends (programmatic dependent launch,
// compute capability 9.0 and later). For few rows, the gaps between kernels would otherwise take
// about as long as the small kernels themselves.

#include <cuda_runtime_api.h>

namespace logprobd::kernels {

/// Returns the attribute of an overlapped launch. It requires compute capability 9.0.
inline cudaLaunchAttribute OverlapAttribute() {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

/// Launches a kernel that may start while the previous kernel on the stream ends, whatever that
/// kernel is. Before it accesses memory, each of its threads must call WaitForPreviousKernel. If
/// the code that the device runs was compiled for GPUs before compute capability 9.0, it cannot
/// wait and starts when the previous kernel has ended.
template <class Params>
cudaError_t LaunchOverlapped(void (*kernel)(Params), unsigned blocks, unsigned threads,
                             const Params& params, cudaStream_t stream) {
  cudaFuncAttributes attributes{};
  if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess) {
    return error;
  }
  constexpr int kHopper = 90;
  cudaLaunchAttribute overlap = OverlapAttribute();
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = attributes.ptxVersion >= kHopper ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

/// Waits until the previous kernel has ended and its writes are visible. Returns at once if the
/// launch was not overlapped.
__device__ __forceinline__ void WaitForPreviousKernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

/// Lets the next kernel start as soon as all blocks of this one have called it. That kernel's
/// blocks then wait on multiprocessors, so only kernels that end soon without the help of others
/// may call it.
__device__ __forceinline__ void StartNextKernel() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

}  // namespace logprobd::kernels
