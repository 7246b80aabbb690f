#include "server/engine/cuda_plan.h"

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/chunked/tile_stats.h"
#include "kernels/chunked/top_k.h"
#include "kernels/fused_sm90/fused_partials.h"
#include "server/engine/cuda_engine.h"
#include "server/engine/cuda_head.h"
#include "server/engine/kernel_dtype.h"
#include "server/weights/head_weights.h"

namespace logprobd {
namespace {

using kernels::ChunkPlan;

static_assert(kTopKMax == kernels::kTopKMax);

absl::Status NoGpu(cudaError_t error) {
  (void)cudaGetLastError();
  return absl::FailedPreconditionError(
      absl::StrCat("no NVIDIA driver/GPU: ", cudaGetErrorString(error),
                   "; install the driver (for CUDA 13: 580 or later) or use --device cpu"));
}

int FirstGpu(const EngineOptions& options) {
  return options.gpus.empty() ? 0 : options.gpus.front();
}

/// Why the fused kernel does not score; empty where it does.
std::string WhyNoFused(const HeadInfo& head, const EngineOptions& options) {
  if (options.kernel == GpuKernel::kChunked) return "chunked was asked for";
  if (!kernels::HasFusedKernel())
    return "this build has no fused kernel (it needs CUTLASS and architecture 90)";
  if (head.dtype == Dtype::kF32) return "the fused kernel takes no fp32 head";
  int major = 0;
  int minor = 0;
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, FirstGpu(options));
  (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, FirstGpu(options));
  return major == 9 && minor == 0 ? "" : "the fused kernel needs compute capability 9.0";
}

}  // namespace

ChunkPlan ChunkPlanOf(const HeadInfo& head, const EngineOptions& options) {
  kernels::ChunkPlanOptions chunk_options;
  chunk_options.vocab_size = head.vocab_size;
  chunk_options.hidden_size = head.hidden_size;
  chunk_options.head_dtype = KernelDtype(head.dtype);
  chunk_options.batch_rows_max = options.batch_rows_max;
  chunk_options.top_k_max = options.top_k_max;
  chunk_options.with_fused = WhyNoFused(head, options).empty();
  int num_sms = 0;
  if (cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, FirstGpu(options)) ==
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
  if (FirstGpu(options) < 0 || FirstGpu(options) >= num_devices) {
    return absl::FailedPreconditionError(
        absl::StrCat("GPU ", FirstGpu(options), " does not exist: there ",
                     num_devices == 1 ? "is " : "are ", num_devices, ", counted from 0"));
  }
  cudaDeviceProp properties{};
  error = cudaGetDeviceProperties(&properties, FirstGpu(options));
  if (error != cudaSuccess) return NoGpu(error);
  const std::string device = absl::StrCat(properties.name, ", compute capability ",
                                          properties.major, ".", properties.minor);
  if (properties.major < 8) {
    return absl::FailedPreconditionError(
        absl::StrCat("GPU ", FirstGpu(options), " (", device,
                     ") is too old: 8.0 or later is needed; use --device cpu"));
  }
  error = cudaSetDevice(FirstGpu(options));
  if (error == cudaSuccess) error = kernels::ProbeTileStats();
  if (error == cudaErrorNoKernelImageForDevice) {
    (void)cudaGetLastError();
    return absl::FailedPreconditionError(absl::StrCat(
        "this build has no code for GPU ", FirstGpu(options), " (", device,
        "): build with -DCMAKE_CUDA_ARCHITECTURES=", properties.major, properties.minor));
  }
  if (error != cudaSuccess) return NoGpu(error);
  if (head.vocab_size > kVocabSizeMax) {
    return absl::FailedPreconditionError(
        absl::StrCat("vocabulary of ", head.vocab_size, " is above the engine's ", kVocabSizeMax));
  }
  const std::string why_no_fused = WhyNoFused(head, options);
  if (options.kernel == GpuKernel::kFused && !why_no_fused.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("kernel fused was asked for, but ", why_no_fused, "; use auto or chunked"));
  }
  const ChunkPlan chunks = ChunkPlanOf(head, options);
  if (chunks.workspace_bytes > kernels::ChunkPlanOptions{}.workspace_bytes_max) {
    return absl::FailedPreconditionError(
        absl::StrCat("batches of ", options.batch_rows_max, " rows need ",
                     chunks.workspace_bytes >> 20, " MiB of GPU workspace, the limit is ",
                     kernels::ChunkPlanOptions{}.workspace_bytes_max >> 20,
                     ": lower --batch-rows or --top-k-max"));
  }
  const std::string place = absl::StrCat("gpu", FirstGpu(options));
  EnginePlan plan;
  plan.device = Device::kCuda;
  plan.engine = chunks.with_fused ? "cuda/fused" : "cuda/chunked";
  plan.reason = std::move(reason);
  absl::StrAppend(&plan.reason, plan.reason.empty() ? "" : "; ", device);
  if (!why_no_fused.empty()) absl::StrAppend(&plan.reason, "; ", why_no_fused);
  plan.memory = {
      {place, "weights", CudaHeadBytes(chunks, head.has_bias)},
      {place, "workspace", chunks.workspace_bytes},
      {"host", "workspace", kernels::kChunkSlots * chunks.slot_bytes, /*is_pinned=*/true}};
  return plan;
}

}  // namespace logprobd
