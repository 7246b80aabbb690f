#include "server/engine/cuda_plan.h"

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/chunked/tile_stats.h"
#include "kernels/chunked/top_k.h"
#include "server/engine/cuda_engine.h"
#include "server/engine/cuda_head.h"
#include "server/weights/head_weights.h"

namespace logprobd {
namespace {

using kernels::ChunkPlan;

absl::Status NoGpu(cudaError_t error) {
  (void)cudaGetLastError();
  return absl::FailedPreconditionError(
      absl::StrCat("no NVIDIA driver/GPU: ", cudaGetErrorString(error),
                   "; install the driver (for CUDA 13: 580 or later) or use --device cpu"));
}

}  // namespace

ChunkPlan ChunkPlanOf(const HeadInfo& head, const EngineOptions& options) {
  kernels::ChunkPlanOptions chunk_options;
  chunk_options.vocab_size = head.vocab_size;
  chunk_options.hidden_size = head.hidden_size;
  chunk_options.head_dtype = KernelDtype(head.dtype);
  chunk_options.batch_rows_max = options.batch_rows_max;
  chunk_options.top_k_max = kernels::kTopKMax;
  int num_sms = 0;
  if (cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, options.gpu) ==
      cudaSuccess) {
    chunk_options.num_sms = num_sms;  // else the default: only speed hangs on it
  }
  return kernels::PlanChunks(chunk_options);
}

absl::StatusOr<EnginePlan> PlanCudaEngine(const HeadInfo& head, const EngineOptions& options,
                                          std::string reason) {
  int num_devices = 0;
  cudaError_t error = cudaGetDeviceCount(&num_devices);
  if (error != cudaSuccess) return NoGpu(error);
  if (options.gpu < 0 || options.gpu >= num_devices) {
    return absl::FailedPreconditionError(
        absl::StrCat("GPU ", options.gpu, " does not exist: there ",
                     num_devices == 1 ? "is " : "are ", num_devices, ", counted from 0"));
  }
  cudaDeviceProp properties{};
  error = cudaGetDeviceProperties(&properties, options.gpu);
  if (error != cudaSuccess) return NoGpu(error);
  const std::string device = absl::StrCat(properties.name, ", compute capability ",
                                          properties.major, ".", properties.minor);
  if (properties.major < 8) {
    return absl::FailedPreconditionError(
        absl::StrCat("GPU ", options.gpu, " (", device,
                     ") is too old: 8.0 or later is needed; use --device cpu"));
  }
  error = cudaSetDevice(options.gpu);
  if (error == cudaSuccess) error = kernels::ProbeTileStats();
  if (error == cudaErrorNoKernelImageForDevice) {
    (void)cudaGetLastError();
    return absl::FailedPreconditionError(absl::StrCat(
        "this build has no code for GPU ", options.gpu, " (", device,
        "): build with -DCMAKE_CUDA_ARCHITECTURES=", properties.major, properties.minor));
  }
  if (error != cudaSuccess) return NoGpu(error);
  if (head.vocab_size > kVocabSizeMax) {
    return absl::FailedPreconditionError(
        absl::StrCat("vocabulary of ", head.vocab_size, " is above the engine's ", kVocabSizeMax));
  }
  const ChunkPlan chunks = ChunkPlanOf(head, options);
  const std::string place = absl::StrCat("gpu", options.gpu);
  EnginePlan plan;
  plan.device = Device::kCuda;
  plan.engine = "cuda/chunked";
  plan.reason = std::move(reason);
  absl::StrAppend(&plan.reason, plan.reason.empty() ? "" : "; ", device);
  plan.memory = {{place, "weights", CudaHeadBytes(chunks, head.has_bias)},
                 {place, "workspace", chunks.workspace_bytes},
                 {"host", "workspace", kernels::kChunkSlots * chunks.slot_bytes}};
  return plan;
}

}  // namespace logprobd
