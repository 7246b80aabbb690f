#include "server/engine/cuda_host_pinning.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "server/base/log.h"
#include "server/engine/cuda_status.h"

namespace logprobd {
namespace {

class CudaHostPinning final : public HostPinning {
 public:
  explicit CudaHostPinning(int32_t gpu) : gpu_(gpu) {}

  absl::Status Pin(absl::Span<std::byte> memory) override {
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(gpu_));  // else a context on GPU 0 is made
    const cudaError_t error =
        cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable);
    if (error == cudaSuccess) return absl::OkStatus();
    (void)cudaGetLastError();
    return absl::ResourceExhaustedError(
        absl::StrCat("no ", memory.size(),
                     " bytes of memory could be pinned for GPUs: ", cudaGetErrorString(error)));
  }

  void Unpin(absl::Span<std::byte> memory) override {
    (void)cudaSetDevice(gpu_);
    const cudaError_t error = cudaHostUnregister(memory.data());
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();
    LogWarning("memory of a client could not be unpinned", {{"error", cudaGetErrorString(error)}});
  }

  bool pins() const override { return true; }

 private:
  const int32_t gpu_;
};

}  // namespace

std::unique_ptr<HostPinning> CreateCudaHostPinning(int32_t gpu) {
  return std::make_unique<CudaHostPinning>(gpu);
}

}  // namespace logprobd
