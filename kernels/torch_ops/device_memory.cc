#include "kernels/torch_ops/device_memory.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <map>
#include <mutex>

#include "kernels/torch_ops/device_arrays.h"

namespace logprobd::torch_ops {
namespace {

using Clock = std::chrono::steady_clock;

/// What a GPU said, and what torch held then. Asking it takes longer than a small step.
struct Answer {
  Clock::time_point time;
  int64_t free_bytes = 0;
  int64_t reserved_bytes = 0;
};
constexpr std::chrono::seconds kAnswerAge(1);

/// Bytes of the GPU itself that are free; of others' memory the news may be kAnswerAge old.
int64_t DeviceFreeBytes(c10::DeviceIndex device, int64_t reserved_bytes) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, Answer> answers;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = answers.try_emplace(device);
  Answer& answer = found->second;
  if (is_new || Clock::now() - answer.time > kAnswerAge) {
    const c10::cuda::CUDAGuard on_device(device);
    size_t free = 0;
    size_t total = 0;
    CheckLaunch(cudaMemGetInfo(&free, &total), "the free memory of a GPU");
    answer = {Clock::now(), static_cast<int64_t>(free), reserved_bytes};
  }
  return answer.free_bytes + answer.reserved_bytes - reserved_bytes;
}

}  // namespace

int64_t FreeBytes(int64_t device, int64_t enough) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(index);
  const int64_t reserved = stats.reserved_bytes[0].current;
  const int64_t unused = reserved - stats.allocated_bytes[0].current;
  return unused >= enough ? unused : unused + DeviceFreeBytes(index, reserved);
}

}  // namespace logprobd::torch_ops
